"""Builds the page with gradio: controls, two columns of text, the draft tree of a round, and a tab for the doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from ..diagnosis.doctor import diagnose
from ..generation.verification.rules import RULES
from .conversation import Conversation, round_picture, round_words
from .doctor import diagnosis_html, join_prompts, split_prompts
from .models import TREES, Models, Settings
from .replies import one_line
from .views import CSS, PICK_ROUND, PLAIN, WITH_HEADS, comparison, legend, message, numbers_html, reply_html

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # must be set before gradio is imported

import gradio as gr

MOST_TOKENS = 512
NOTHING = {
    True: "Ask something.",
    False: "Write the beginning of a text; the target has no chat template and continues it.",
}
WHY = """Draft heads guess several tokens ahead, and the target checks all of them in one forward. The text on the
left is the target's own, like the text on the right, but takes fewer forwards. The columns are written one after the
other, so that neither slows the other down."""


def build_page(models: Models, examples: Sequence[tuple[str, str]] = (), chosen: str | None = None) -> gr.Blocks:
    """Builds the page for a target and its heads; launch it with [`launch_options`].

    Args:
        models: Target and heads that generate.
        examples: Names and texts of prompts to start from.
        chosen: Name of the heads that are selected at first; default the first ones.
    """
    with gr.Blocks(title="hf-specheads", fill_width=True, analytics_enabled=False) as page:
        gr.Markdown(f"## Draft heads at work\n{WHY}")
        with gr.Tab("Chat"):
            talk = _chat_tab(models, examples, chosen or next(iter(models.loaders)))
        with gr.Tab("Doctor"):
            _doctor_tab(models, examples, chosen or next(iter(models.loaders)))
        page.load(Conversation, outputs=talk, show_progress="hidden")
    return page


def launch_options() -> dict[str, Any]:
    """Arguments for `launch`; the page loads no fonts or scripts from other servers."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    return {"theme": theme, "css": CSS, "quiet": True, "ssr_mode": False, "footer_links": [], "share": False,
            "enable_monitoring": False}  # fmt: skip


# ---------------------------------------------------------------------- chat
def _chat_tab(models: Models, examples: Sequence[tuple[str, str]], chosen: str) -> gr.State:
    """Builds the chat tab, and returns the state that holds the visitor's [`Conversation`]."""
    talk = gr.State(None)  # becomes a Conversation when the page is loaded
    with gr.Row():
        with gr.Column(scale=1, min_width=250):
            controls = _controls(models, chosen)
        with gr.Column(scale=4, elem_classes="sh-tight"):
            prompt, send, stop, clear, starts = _input(examples)
            with gr.Row():
                with gr.Column(elem_classes="sh-tight"):
                    ours_head = gr.HTML(numbers_html(WITH_HEADS, None, True), js_on_load=None, elem_id="ours-head")
                    ours = gr.HTML(reply_html([], None, NOTHING[models.chats]), js_on_load=PICK_ROUND, elem_id="ours")
                with gr.Column(elem_classes="sh-tight"):
                    plain_head = gr.HTML(numbers_html(PLAIN, None, False), js_on_load=None, elem_id="plain-head")
                    plain = gr.HTML(reply_html([]), js_on_load=None, elem_id="plain")
            gr.HTML(legend(), js_on_load=None)
            verdict = gr.HTML("", js_on_load=None, elem_id="verdict")
            step = gr.Slider(0, 1, 0, step=1, label="Step: the draft tree of a round (0 is the prompt's forward)",
                             elem_id="step", interactive=True)  # fmt: skip
            words = gr.HTML("", js_on_load=None, elem_id="round-words")
            tree = gr.HTML(round_picture([], 0, models), js_on_load=None, elem_id="tree")
    shown = [ours_head, ours, plain_head, plain, verdict, step, words, tree]

    def answer(state: Conversation | None, text: str, *values: Any) -> Iterator[list[Any]]:
        yield from _answer(models, state or Conversation(), text, Settings(*values))

    def look(state: Conversation | None, number: float | None) -> list[Any]:
        return _round_views(models, state or Conversation(), int(number or 0))

    def pick(state: Conversation | None, event: gr.EventData) -> list[Any]:
        number = int(event.round)
        return [number, *_round_views(models, state or Conversation(), number)]

    def halt(state: Conversation | None) -> None:
        if state is not None:
            state.stop()

    def forget(state: Conversation | None) -> list[Any]:
        if state is not None:
            state.left = True
            state.stop()
        return [Conversation(), *_all_views(models, Conversation())]

    asked = {"fn": answer, "inputs": [talk, prompt, *controls], "outputs": [talk, *shown], "concurrency_limit": 1,
             "show_progress": "hidden"}  # fmt: skip
    send.click(**asked)
    prompt.submit(**asked)
    # "Stop" does not cancel gradio's event: the reply itself ends after its current step, and the page shows that.
    stop.click(halt, talk, show_progress="hidden")
    clear.click(forget, talk, [talk, *shown], show_progress="hidden")
    if starts is not None:
        starts.dataset.click(forget, talk, [talk, *shown], show_progress="hidden")
    step.input(look, [talk, step], [ours, words, tree], show_progress="hidden")
    ours.click(pick, [talk], [step, ours, words, tree], show_progress="hidden")
    return talk


def _input(examples: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """Builds the text box of the prompt, its buttons, and prompts to start a chat from if there are any."""
    with gr.Row(equal_height=True):
        prompt = gr.Textbox(
            examples[0][1] if examples else "", lines=4, max_lines=8, show_label=False, container=False, scale=6,
            placeholder="A message to the target", elem_id="prompt",
        )  # fmt: skip
        with gr.Column(scale=1, min_width=120, elem_classes="sh-tight"):
            send = gr.Button("Generate", variant="primary", size="sm", elem_id="generate")
            stop = gr.Button("Stop", size="sm", elem_id="stop")
            clear = gr.Button("New chat", size="sm", elem_id="clear")
    starts = None
    if examples:
        names, texts = [name for name, _ in examples], [[text] for _, text in examples]
        starts = gr.Examples(texts, prompt, label="Prompts to start a new chat from", example_labels=names)
    return prompt, send, stop, clear, starts


def _controls(models: Models, chosen: str) -> list[Any]:
    """Builds the controls, in the order of the fields of [`Settings`]."""
    given = Settings(chosen)
    names = list(models.loaders)
    heads = gr.Dropdown(names, value=chosen, label="Draft heads", elem_id="heads")
    tree = gr.Dropdown(list(TREES), value=given.tree, label="Draft tree", elem_id="tree-kind",
                       info="automatic: the tree that has paid off most so far")  # fmt: skip
    depth = gr.Slider(1, 12, given.depth, step=1, label="Depth: draft positions", visible=False, elem_id="depth")
    top_k = gr.Slider(1, 12, given.top_k, step=1, label="Children per node", visible=False, elem_id="top-k")
    nodes = gr.Slider(2, 64, given.total_tokens, step=1, label="Nodes, the root included", visible=False,
                      elem_id="nodes")  # fmt: skip
    adaptive = gr.Checkbox(given.adaptive, label="Plain steps where drafts do not pay off", elem_id="adaptive")
    temperature = gr.Slider(
        0, 1.5, given.temperature, step=0.05, label="Temperature (0: greedy)", elem_id="temperature"
    )
    rule = gr.Radio(list(RULES), value=given.verification, label="Verification", elem_id="rule",
                    info="typical: faster when sampling, and lossy")  # fmt: skip
    tokens = gr.Slider(8, MOST_TOKENS, given.max_new_tokens, step=8, label="Maximum of new tokens", elem_id="tokens")
    seed = gr.Number(given.seed, precision=0, label="Seed", elem_id="seed")
    compare = gr.Checkbox(given.compare, label="Compare with plain decoding", elem_id="compare")

    def sizes(kind: str) -> list[Any]:
        return [gr.update(visible=kind in ("chain", "dynamic")), *[gr.update(visible=kind == "dynamic")] * 2]

    tree.change(sizes, tree, [depth, top_k, nodes], show_progress="hidden")
    return [heads, tree, depth, top_k, nodes, adaptive, temperature, rule, tokens, seed, compare]


def _answer(models: Models, state: Conversation, text: str, settings: Settings) -> Iterator[list[Any]]:
    """Yields the views of the page while a reply is written, until the visitor starts another chat.

    Errors are shown in place of the verdict.
    """
    try:
        with closing(state.ask(models, text or "", settings)) as looks:
            for _ in looks:
                if state.left:
                    return
                yield [state, *_all_views(models, state)]
    except Exception as error:  # shown to the visitor, so that the page keeps working
        views = _all_views(models, state)
        views[4] = message(one_line(error))
        yield [state, *views]
        return
    if not state.left:
        yield [state, *_all_views(models, state)]


def _all_views(models: Models, state: Conversation) -> list[Any]:
    ours, plain = state.last, state.last_plain
    number, most = state.step_to_show, len(ours.rounds) - 1 if ours else 0
    return [
        numbers_html(WITH_HEADS, ours, True),
        reply_html(state.ours, number if ours and ours.done else None, NOTHING[models.chats]),
        numbers_html(PLAIN, plain, False),
        reply_html(state.plain),
        comparison(ours, plain, state.lossy) if ours else "",
        gr.update(maximum=max(most, 1), value=number),
        *_round_views(models, state, number)[1:],
    ]


def _round_views(models: Models, state: Conversation, number: int) -> list[Any]:
    rounds = state.last.rounds if state.last else []
    return [reply_html(state.ours, number, NOTHING[models.chats]), message(round_words(rounds, number), ""),
            round_picture(rounds, number, models)]  # fmt: skip


# ---------------------------------------------------------------------- doctor
def _doctor_tab(models: Models, examples: Sequence[tuple[str, str]], chosen: str) -> None:
    gr.Markdown(
        "Why are few drafts of these heads accepted? The target continues the prompts, and every setting that the "
        "files of the heads do not determine is tried on its texts, as `specheads doctor` does."
    )
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            heads = gr.Dropdown(list(models.loaders), value=chosen, label="Draft heads", elem_id="doctor-heads")
            prompts = gr.Textbox(join_prompts([text for _, text in examples]), lines=12, max_lines=18,
                                 label="Prompts, separated by lines of ---", elem_id="doctor-prompts")  # fmt: skip
            tokens = gr.Slider(16, 256, 64, step=16, label="New tokens per prompt", elem_id="doctor-tokens")
            speed = gr.Checkbox(False, label="Also run rounds: tau in use and speed-up", elem_id="doctor-speed")
            start = gr.Button("Examine", variant="primary", elem_id="examine")
        with gr.Column(scale=3):
            found = gr.HTML(
                message("Nothing has been examined yet.", ""), js_on_load=None, elem_id="diagnosis", min_height=200
            )

    def examine(name: str, text: str, count: float, rounds: bool) -> str:
        return _examine(models, name, text or "", int(count), bool(rounds))

    start.click(examine, [heads, prompts, tokens, speed], found, concurrency_limit=1)


def _examine(models: Models, name: str, text: str, max_new_tokens: int, speed: bool) -> str:
    """Runs the doctor and returns its page; errors are shown in its place."""
    try:
        prompts = models.prompts(split_prompts(text))
        heads = models.unbound_heads(name)
        if not models.lock.acquire(blocking=False):
            raise RuntimeError("a reply is being written; try again when it has ended.")
        try:
            options = {"tokenizer": models.tokenizer, "max_new_tokens": max_new_tokens, "speed": speed}
            return diagnosis_html(diagnose(models.target, heads, prompts, **options))
        finally:
            models.lock.release()
    except Exception as error:  # shown to the visitor, so that the page keeps working
        return message(one_line(error))
