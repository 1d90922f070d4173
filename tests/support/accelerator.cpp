// An accelerator that is none: device memory is memory of the host, kernels are those of the CPU.
//
// What it has of a real one is what goes wrong in Python: operators refuse tensors of several devices, new memory is
// junk, the host is told of everything it would wait for, and a clock of its own makes work take time that only
// those wait for who ask. See accelerator.py.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
using Clock = std::chrono::steady_clock;

thread_local c10::DeviceIndex current = 0;
thread_local bool on_host = false;  // while a kernel runs on copies of its arguments, which cost nothing
Clock::time_point busy_until[DEVICES];
double seconds_per_operator = 0;
void (*listener)(const char* what, const char* name) = nullptr;

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current; }

void tell(const char* what, const std::string& name) {
  if (listener && !on_host) listener(what, name.c_str());
}

void launch(c10::DeviceIndex index) {
  if (on_host || seconds_per_operator <= 0) return;
  auto& until = busy_until[index];
  until = std::max(until, Clock::now()) +
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_per_operator));
}

void wait(c10::DeviceIndex index, const char* what, const std::string& name) {
  if (on_host) return;
  tell(what, name);
  std::this_thread::sleep_until(busy_until[index]);
}

struct OnHost {
  bool before = on_host;
  OnHost() { on_host = true; }
  ~OnHost() { on_host = before; }
};

// ------------------------------------------------------------------ memory, devices
struct Memory final : c10::Allocator {
  static void release(void* pointer) { std::free(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes && posix_memalign(&pointer, 64, bytes)) throw std::bad_alloc();
    if (bytes) std::memset(pointer, 0x7f, bytes);
    return {pointer, pointer, &release, c10::Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void synchronizeStream(const c10::Stream& stream) const override { wait(stream.device_index(), "wait", "stream"); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { wait(index, "wait", "device"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};

// ------------------------------------------------------------------ operators
// How often the host waits in an operator itself: for the size of its result, or for a check of its arguments.
const std::map<std::string, int> WAITS = {
    {"aten::nonzero", 1}, {"aten::masked_select", 1}, {"aten::_unique2", 1}, {"aten::unique_dim", 1},
    {"aten::unique_consecutive", 1}, {"aten::equal", 1}, {"aten::bincount", 1}, {"aten::multinomial", 2},
};
const std::set<std::string> TAKES_HOST_INDICES = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) found.push_back(*tensor);
  return found;
}

bool selects(const at::Tensor& tensor) { return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte; }

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const bool indexing = TAKES_HOST_INDICES.count(name) > 0;
  std::optional<c10::Device> device;
  std::vector<at::Tensor> of_host, indices;
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t place = first; place < stack->size(); place++) {
    const auto& value = (*stack)[place];
    if (value.isDevice() && value.toDevice().type() == KIND && !device)
      device = c10::Device(KIND, index_of(value.toDevice()));
    for (const auto& tensor : tensors_of(value)) {
      if (!tensor.defined()) continue;
      if (indexing && place == first + 1) indices.push_back(tensor);
      if (tensor.is_cpu() && tensor.dim() > 0) of_host.push_back(tensor);
      if (tensor.device().type() != KIND) continue;
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ",
                  "at least two devices, ", *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
    }
  }
  const auto index = device ? device->index() : current;
  for (const auto& tensor : of_host) {
    const bool is_index = std::any_of(indices.begin(), indices.end(), [&](auto& one) { return one.is_same(tensor); });
    TORCH_CHECK(on_host || is_index, "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(KIND, index), " and cpu! (", name, ")");
    wait(index, "wait", name + " with an index of the host");
  }
  for (const auto& tensor : indices)
    if (selects(tensor)) wait(index, "wait", name + " with a mask");
  if (auto found = WAITS.find(name); found != WAITS.end())
    for (int times = 0; times < found->second; times++) wait(index, "wait", name);
  tell("operator", name);
  launch(index);
  c10::DeviceGuard guard(c10::Device(KIND, index));
  OnHost quiet;
  at::native::cpu_fallback(op, stack);
}

at::Tensor on_the_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool down = from.device().type() == KIND, up = to.device().type() == KIND;
  const auto index = down ? from.device().index() : to.device().index();
  if (down && up) {
    tell(from.device() == to.device() ? "operator" : "crossing", "copy");
    launch(index);
  } else if (!non_blocking) {
    wait(index, "wait", down ? "copy to the host" : "copy from the host");
  } else {
    tell("copy", down ? "to the host" : "from the host");
  }
  on_the_host(to).copy_(on_the_host(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  const size_t bytes = (c10::multiply_integers(wanted) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto data = memory.allocate(bytes);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(data));
    self.storage().set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  wait(self.device().index(), "wait", "item");
  return on_the_host(self).item();
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_strided(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_strided);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention);
}

extern "C" {
void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void listen(void (*to)(const char*, const char*)) { listener = to; }
void set_seconds_per_operator(double seconds) { seconds_per_operator = seconds; }
int current_device() { return current; }
void set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
void synchronize(int index) { wait(static_cast<c10::DeviceIndex>(index), "wait", "device"); }
}
