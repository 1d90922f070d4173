/* Products of a few rows with a weight, each part of which is read from memory once; and the highest of rows.

   out[r][c] = bias[c] + sum over i of x[r][i] * w[c][i], added in float32 in the same order whatever the number of rows,
   so a row has the same result in every company. A tile of some rows and some outputs is held in registers; the numbers
   of a weight are widened to float32 as they are read. few_rows_native.py builds it: KIND is float32, bfloat16 or
   float16. */
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef vec some_floats __attribute__((aligned(4), may_alias));
typedef uint16_t some_halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* How tall a tile is at most, and how many outputs wide one of so many rows: registers hold it, the numbers of the
   weight and one of a row. */
#define TALLEST 6
#define FEWEST 16 /* outputs of a thread: as many as a tile is wide, or more */
#if LANES == 16 || defined(__aarch64__)
#define WIDTH(rows) 4
#else
#define WIDTH(rows) ((rows) < 3 ? 4 : (rows) < 5 ? 3 : 2)
#endif

/* ------------------------------------------------------------------ numbers as they lie in memory */
typedef float float32;
typedef uint16_t bfloat16;

static inline vec widen_float32(const float *x) { return *(const some_floats *)x; }
static inline vec widen_bfloat16(const bfloat16 *x) {
  return (vec)(__builtin_convertvector(*(const some_halves *)x, bits) << 16);
}
static inline float of_float32(const float *x) { return *x; }
static inline float of_bfloat16(const bfloat16 *x) {
  union { uint32_t bits; float number; } wide = {(uint32_t)*x << 16};
  return wide.number;
}
static inline void put_float32(float *x, float number) { *x = number; }
static inline void put_bfloat16(bfloat16 *x, float number) { /* to the nearest, of two the even one */
  union { float number; uint32_t bits; } wide = {number};
  *x = number != number ? 0x7fc0 : (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
}

#if defined(__F16C__)
#include <immintrin.h>
typedef uint16_t float16;
static inline float of_float16(const float16 *x) { return _cvtsh_ss(*x); }
static inline void put_float16(float16 *x, float number) { *x = _cvtss_sh(number, 0); }
#if LANES == 16
static inline vec widen_float16(const float16 *x) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)x)); }
#else
static inline vec widen_float16(const float16 *x) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)x)); }
#endif
#elif defined(__aarch64__)
typedef __fp16 float16;
typedef float16 some_float16 __attribute__((vector_size(8), aligned(2), may_alias));
static inline float of_float16(const float16 *x) { return *x; }
static inline void put_float16(float16 *x, float number) { *x = number; }
static inline vec widen_float16(const float16 *x) { return __builtin_convertvector(*(const some_float16 *)x, vec); }
#endif

/* Numbers of two vectors, by their places; of every four, as wide shuffles are the cheapest. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif
#define FOUR(...) FOUR_OF(__VA_ARGS__)
#define FOUR_OF(w, x, y, z, at) (w) + (at), (x) + (at), (y) + (at), (z) + (at)
#if LANES == 16
#define OF_EVERY_FOUR(a, b, ...)                                                                                      \
  PICK(a, b, FOUR(__VA_ARGS__, 0), FOUR(__VA_ARGS__, 4), FOUR(__VA_ARGS__, 8), FOUR(__VA_ARGS__, 12))
#elif LANES == 8
#define OF_EVERY_FOUR(a, b, ...) PICK(a, b, FOUR(__VA_ARGS__, 0), FOUR(__VA_ARGS__, 4))
#else
#define OF_EVERY_FOUR(a, b, ...) PICK(a, b, FOUR(__VA_ARGS__, 0))
#endif

/* The sums of four vectors: each is added in the same order, in whatever place. */
static inline quad sums(vec a, vec b, vec c, vec d) {
  vec ab = OF_EVERY_FOUR(a, b, 0, LANES, 1, LANES + 1) + OF_EVERY_FOUR(a, b, 2, LANES + 2, 3, LANES + 3);
  vec cd = OF_EVERY_FOUR(c, d, 0, LANES, 1, LANES + 1) + OF_EVERY_FOUR(c, d, 2, LANES + 2, 3, LANES + 3);
  vec all = OF_EVERY_FOUR(ab, cd, 0, 1, LANES, LANES + 1) + OF_EVERY_FOUR(ab, cd, 2, 3, LANES + 2, LANES + 3);
  const quad *parts = (const quad *)&all;
  quad four = parts[0];
  for (int i = 1; i < LANES / 4; i++) four += parts[i];
  return four;
}
static inline float sum(vec x) { return sums(x, x, x, x)[0]; }

/* ------------------------------------------------------------------ what Python's limited API has */
/* Declared here, as its headers need not be installed: https://docs.python.org/3/c-api/stable.html */
typedef struct _object object;
typedef struct {
  const char *name;
  object *(*function)(object *, object *const *, ptrdiff_t);
  int flags;
  const char *doc;
} method;
#define FASTCALL 0x80
extern object *PyCFunction_NewEx(method *, object *, object *);
extern ptrdiff_t PyLong_AsSsize_t(object *);
extern object *PyList_GetItem(object *, ptrdiff_t);
extern object *PyTuple_GetItem(object *, ptrdiff_t);
extern ptrdiff_t PyTuple_Size(object *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern void Py_IncRef(object *);
extern object _Py_NoneStruct;

static void *(*pointer_of)(object *); /* torch's: of a tensor, to its numbers */

/* ------------------------------------------------------------------ products */
/* Compilers read a row from memory for every output of a tile, which is more than there is time for. */
#if defined(__x86_64__)
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#else
#define IN_REGISTER(vector) __asm__("" : "+w"(vector))
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

#define PRODUCTS_OF(KIND)                                                                                             \
  INLINE void tile_##KIND(int rows, int width, const float *x, const KIND *w, const KIND *bias, KIND *out,            \
                          ptrdiff_t inputs, ptrdiff_t outputs) {                                                      \
    vec parts[TALLEST][4]; /* of sums */                                                                              \
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++) parts[r][c] = (vec){0};              \
    for (ptrdiff_t i = 0; i < inputs; i += LANES) {                                                                   \
      vec column[4];                                                                                                  \
      UNROLLED for (int c = 0; c < width; c++) {                                                                      \
        column[c] = widen_##KIND(w + c * inputs + i);                                                                 \
        __builtin_prefetch(w + (c + width) * inputs + i); /* of the next tile: processors do not foresee short rows */\
      }                                                                                                               \
      UNROLLED for (int r = 0; r < rows; r++) {                                                                       \
        vec row = widen_float32(x + r * inputs + i);                                                                  \
        IN_REGISTER(row);                                                                                             \
        UNROLLED for (int c = 0; c < width; c++) parts[r][c] += row * column[c];                                      \
      }                                                                                                               \
    }                                                                                                                 \
    UNROLLED for (int r = 0; r < rows; r++) {                                                                         \
      quad found = sums(parts[r][0], parts[r][1], parts[r][2], parts[r][3]);                                          \
      UNROLLED for (int c = 0; c < width; c++)                                                                        \
        put_##KIND(out + r * outputs + c, found[c] + (bias ? of_##KIND(bias + c) : 0));                               \
    }                                                                                                                 \
  }                                                                                                                   \
                                                                                                                      \
  INLINE void columns_##KIND(int tall, int width, ptrdiff_t rows, const float *x, const KIND *w, const KIND *bias,    \
                             KIND *out, ptrdiff_t inputs, ptrdiff_t outputs, ptrdiff_t from, ptrdiff_t to) {          \
    ptrdiff_t whole = rows - (rows + tall - 1) / tall * (tall - 1); /* tiles of all their rows, before those of less */\
    for (ptrdiff_t next = from; next < to; next += width) {                                                           \
      ptrdiff_t c = next + width < to ? next : to - width, r = 0;                                                     \
      const KIND *column = w + c * inputs, *added = bias ? bias + c : bias;                                           \
      KIND *corner = out + c;                                                                                         \
      for (; r < whole * tall; r += tall)                                                                             \
        tile_##KIND(tall, width, x + r * inputs, column, added, corner + r * outputs, inputs, outputs);               \
      for (; r < rows; r += tall - 1)                                                                                 \
        tile_##KIND(tall - 1, width, x + r * inputs, column, added, corner + r * outputs, inputs, outputs);           \
    }                                                                                                                 \
  }                                                                                                                   \
                                                                                                                      \
  static void part_##KIND(ptrdiff_t rows, const float *x, const KIND *w, const KIND *bias, KIND *out,                 \
                          ptrdiff_t inputs, ptrdiff_t outputs, ptrdiff_t from, ptrdiff_t to) {                        \
    ptrdiff_t tiles = (rows + TALLEST - 1) / TALLEST;                                                                 \
    switch ((rows + tiles - 1) / tiles) {                                                                             \
      case 1: columns_##KIND(1, WIDTH(1), rows, x, w, bias, out, inputs, outputs, from, to); break;                   \
      case 2: columns_##KIND(2, WIDTH(2), rows, x, w, bias, out, inputs, outputs, from, to); break;                   \
      case 3: columns_##KIND(3, WIDTH(3), rows, x, w, bias, out, inputs, outputs, from, to); break;                   \
      case 4: columns_##KIND(4, WIDTH(4), rows, x, w, bias, out, inputs, outputs, from, to); break;                   \
      case 5: columns_##KIND(5, WIDTH(5), rows, x, w, bias, out, inputs, outputs, from, to); break;                   \
      default: columns_##KIND(6, WIDTH(6), rows, x, w, bias, out, inputs, outputs, from, to);                         \
    }                                                                                                                 \
  }                                                                                                                   \
                                                                                                                      \
  /* Weights of the same rows: w [outputs, inputs], bias [outputs] or null, out [rows, outputs]. */                   \
  typedef struct {                                                                                                    \
    const KIND *w, *bias;                                                                                             \
    KIND *out;                                                                                                        \
    ptrdiff_t outputs;                                                                                                \
  } product_##KIND;                                                                                                   \
                                                                                                                      \
  /* x [rows, inputs]; wide [rows, inputs] holds the rows in float32, and is x where they are. Inputs are a multiple of\
     16, outputs at least FEWEST. */                                                                                  \
  static void few_rows_##KIND(const KIND *x, float *wide, const product_##KIND *products, ptrdiff_t count,            \
                              ptrdiff_t rows, ptrdiff_t inputs, ptrdiff_t threads) {                                  \
    if ((const void *)wide != (const void *)x)                                                                        \
      for (ptrdiff_t i = 0; i < rows * inputs; i += LANES) *(some_floats *)(wide + i) = widen_##KIND(x + i);          \
    _Pragma("omp parallel for num_threads(threads)")                                                                  \
    for (ptrdiff_t t = 0; t < threads; t++)                                                                           \
      for (ptrdiff_t p = 0; p < count; p++) {                                                                         \
        product_##KIND of = products[p];                                                                              \
        ptrdiff_t parts = of.outputs / FEWEST < threads ? of.outputs / FEWEST : threads; /* a weight may be small */  \
        if (t < parts)                                                                                                \
          part_##KIND(rows, wide, of.w, of.bias, of.out, inputs, of.outputs, of.outputs * t / parts,                  \
                      of.outputs * (t + 1) / parts);                                                                  \
      }                                                                                                               \
  }                                                                                                                   \
                                                                                                                      \
  /* Of Python: rows and their place in float32, how many they are and their inputs; then lists of weights, biases    \
     (None where there is none) and products, and a tuple of their outputs. */                                        \
  static object *called_##KIND(object *self, object *const *given, ptrdiff_t count) {                                 \
    (void)self;                                                                                                       \
    ptrdiff_t rows = PyLong_AsSsize_t(given[2]), inputs = PyLong_AsSsize_t(given[3]), most = 0;                       \
    product_##KIND products[count = PyTuple_Size(given[7])];                                                          \
    for (ptrdiff_t p = 0; p < count; p++) {                                                                           \
      object *bias = PyList_GetItem(given[5], p);                                                                     \
      ptrdiff_t outputs = PyLong_AsSsize_t(PyTuple_GetItem(given[7], p));                                             \
      products[p] = (product_##KIND){pointer_of(PyList_GetItem(given[4], p)),                                         \
                                     bias == &_Py_NoneStruct ? 0 : pointer_of(bias),                                  \
                                     pointer_of(PyList_GetItem(given[6], p)), outputs};                               \
      if (outputs > most) most = outputs;                                                                             \
    }                                                                                                                 \
    ptrdiff_t threads = omp_get_max_threads();                                                                        \
    void *x = pointer_of(given[0]), *wide = pointer_of(given[1]), *state = PyEval_SaveThread();                       \
    few_rows_##KIND(x, wide, products, count, rows, inputs, threads < most / FEWEST ? threads : most / FEWEST);       \
    PyEval_RestoreThread(state);                                                                                      \
    Py_IncRef(&_Py_NoneStruct);                                                                                       \
    return &_Py_NoneStruct;                                                                                           \
  }                                                                                                                   \
  static method method_##KIND = {"few_rows", called_##KIND, FASTCALL, 0};

/* ------------------------------------------------------------------ the highest of rows */
#define BLOCK 256

INLINE vec higher(vec a, vec b) {
  bits chosen = (bits)(b > a);
  return (vec)(((bits)b & chosen) | ((bits)a & ~chosen));
}

/* e^x for x <= 0: 2^n times the polynomial of Cephes' expf in the rest, |rest| <= ln 2 / 2. */
INLINE vec exponential(vec x) {
  const float shift = 12582912; /* 1.5 * 2^23: what is added to it is rounded to whole numbers */
  x = higher(x, (vec){0} - 87.0f);
  vec whole = x * 1.44269504f + shift;
  bits power = (bits)whole << 23;
  whole -= shift;
  vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  return (vec)((bits)(sum * rest * rest + rest + 1) + power);
}

/* NaN where there is one. */
static float highest(const float *x, ptrdiff_t count) {
  float best = -INFINITY;
  bits none = {0}; /* of a lane's numbers is a number */
  ptrdiff_t i = 0;
  if (count >= LANES) {
    vec most = {0};
    most -= INFINITY;
    for (; i + LANES <= count; i += LANES) {
      vec next = *(const some_floats *)(x + i);
      none |= (bits)(next != next);
      most = higher(most, next);
    }
    for (int lane = 0; lane < LANES; lane++) {
      if (none[lane]) return NAN;
      if (most[lane] > best) best = most[lane];
    }
  }
  for (; i < count; i++) {
    if (x[i] != x[i]) return NAN;
    if (x[i] > best) best = x[i];
  }
  return best;
}

/* Where the highest of so many numbers is, the first of several, or the first NaN; and which that is. */
static ptrdiff_t place_of_highest(const float *x, ptrdiff_t count, float *best) {
  ptrdiff_t place = 0;
  *best = -INFINITY;
  for (ptrdiff_t at = 0; at < count && *best == *best; at += BLOCK) {
    float found = highest(x + at, count - at < BLOCK ? count - at : BLOCK);
    if (found > *best || found != found) *best = found, place = at;
  }
  while (*best == *best ? x[place] != *best : x[place] == x[place]) place++;
  return place;
}

/* The log-probability of the highest of so many logits, the first of several, and where it is. NaN and the first one
   where a logit is NaN or infinity. */
static float best_of_row(const float *logits, ptrdiff_t count, ptrdiff_t *place) {
  float best;
  *place = place_of_highest(logits, count, &best);
  ptrdiff_t i = 0;
  vec parts = {0};
  for (; i + LANES <= count; i += LANES) parts += exponential(*(const some_floats *)(logits + i) - best);
  float total = sum(parts);
  vec last = (vec){0} - INFINITY;
  for (int lane = 0; i + lane < count; lane++) last[lane] = logits[i + lane];
  if (i < count) total += sum(exponential(last - best));
  if (total != total) *place = 0;
  return -logf(total);
}

/* Of Python: rows of numbers, how many rows there are and numbers in each, where the highest of each shall be written,
   and how many threads to use; and where the numbers are logits, a vocabulary, of which the highest's token is written
   instead, or None, and where the log-probabilities shall be. */
static object *called_highest(object *self, object *const *given, ptrdiff_t count) {
  (void)self;
  ptrdiff_t rows = PyLong_AsSsize_t(given[1]), numbers = PyLong_AsSsize_t(given[2]);
  ptrdiff_t threads = PyLong_AsSsize_t(given[4]);
  const float *x = pointer_of(given[0]);
  int64_t *found = pointer_of(given[3]);
  const int64_t *vocabulary = count > 5 && given[5] != &_Py_NoneStruct ? pointer_of(given[5]) : 0;
  float *scores = count > 5 ? pointer_of(given[6]) : 0;
  void *state = PyEval_SaveThread();
  _Pragma("omp parallel for num_threads(threads) if (threads > 1)")
  for (ptrdiff_t row = 0; row < rows; row++) {
    float best;
    ptrdiff_t place;
    if (scores)
      scores[row] = best_of_row(x + row * numbers, numbers, &place);
    else
      place = place_of_highest(x + row * numbers, numbers, &best);
    found[row] = vocabulary ? vocabulary[place] : place;
  }
  PyEval_RestoreThread(state);
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}
static method method_highest = {"highest", called_highest, FASTCALL, 0};

#define OF(kind) PRODUCTS_OF(kind)
OF(KIND)

/* Functions for Python, whose calls take less time than those of ctypes. */
#define METHOD(kind) METHOD_OF(kind)
#define METHOD_OF(kind) &method_##kind
object *few_rows_for_python(void *(*torchs_pointer_of)(object *)) {
  pointer_of = torchs_pointer_of;
  return PyCFunction_NewEx(METHOD(KIND), 0, 0);
}
object *highest_for_python(void) { return PyCFunction_NewEx(&method_highest, 0, 0); }
