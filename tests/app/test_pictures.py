"""Pictures of draft trees, pieces of text, and what a transcript counts."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from support.heads import random_heads
from support.targets import plain, prompt, shared_target

from hf_specheads.app.transcript import Pieces, Transcript
from hf_specheads.app.tree_picture import places, shown, tree_picture
from hf_specheads.generation.observer import DraftNode
from hf_specheads.publishing.palette import position_colour

SVG = "{http://www.w3.org/2000/svg}"
NODES = [
    DraftNode(5, -1, 0, 1.0, True),
    DraftNode(6, 0, 1, 0.6, True),
    DraftNode(7, 0, 1, 0.3, False),
    DraftNode(8, 1, 2, 0.5, True),
    DraftNode(9, 1, 2, 0.2, False),
]


def text_of(token: int) -> str:
    return {6: "<b>", 7: " ", 8: "a" * 30}.get(token, f"w{token}")


def picture(own: int | None = 4) -> ET.Element:
    return ET.fromstring(tree_picture(NODES, own, text_of))


def groups(root: ET.Element, kind: str) -> list[ET.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def test_every_node_is_there_with_its_token_and_probability() -> None:
    root = picture()
    assert [len(groups(root, kind)) for kind in ("root", "accepted", "rejected", "own")] == [1, 2, 2, 1]
    words = [[text.text for text in group.iter(f"{SVG}text")] for group in groups(root, "accepted")]
    assert words == [["<b>", ".60"], ["aaaaaaaa…", ".50"]]
    titles = [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g")]
    assert any("token 8, draft position 2" in title and "30.00% from the root" in title for title in titles)
    assert "own: 'w4', token 4" in titles[-1]


def test_accepted_nodes_have_the_colour_of_their_draft_position() -> None:
    colours = [group.find(f"{SVG}rect").get("fill") for group in groups(picture(), "accepted")]
    assert colours == [position_colour(1), position_colour(2)]


def test_no_two_boxes_overlap_and_all_lie_within() -> None:
    root = picture()
    boxes = [{name: float(box.get(name)) for name in ("x", "y", "width", "height")} for box in root.iter(f"{SVG}rect")]
    assert len(boxes) == 6
    for index, one in enumerate(boxes):
        assert one["x"] + one["width"] <= float(root.get("width"))
        assert one["y"] + one["height"] <= float(root.get("height"))
        for other in boxes[index + 1 :]:
            apart_x = abs(one["x"] - other["x"]) >= one["width"]
            assert apart_x or abs(one["y"] - other["y"]) >= one["height"], "boxes overlap"


def test_a_text_that_ends_in_the_path_has_no_token_of_its_own() -> None:
    assert not groups(picture(None), "own")


def test_likely_children_are_above_others() -> None:
    swapped = [NODES[0], NODES[1]._replace(probability=0.1), NODES[2], *NODES[3:]]
    assert places(NODES)[1][1] < places(NODES)[2][1]
    assert places(swapped)[2][1] < places(swapped)[1][1]


def test_white_space_can_be_seen() -> None:
    assert shown(" a\n\t") == "␣a↵⇥" and shown("") == "∅" and len(shown("x" * 40)) == 11


def test_pieces_keep_characters_of_several_tokens_whole() -> None:
    whole = "a€b"
    data = whole.encode()
    pieces = Pieces(lambda ids: bytes(ids).decode(errors="replace"))
    for byte in data:
        pieces.extend([byte])
    assert pieces.pieces == ["a", "", "", "€", "b"] and "".join(pieces.pieces) == whole


def test_pieces_of_a_tokenizer_that_strips_the_first_space() -> None:
    words = {1: " one", 2: " two", 3: "3"}
    pieces = Pieces(lambda ids: "".join(words[token] for token in ids).lstrip())
    pieces.extend([1, 2, 3])
    assert "".join(pieces.pieces) == "one two3"


@pytest.mark.parametrize("tree", [{}, {"kind": "chain", "depth": 3}], ids=["dynamic", "chain"])
def test_a_transcript_counts_what_the_engine_counts(tree) -> None:
    heads, ids, said = random_heads(shared_target(), lookup=3, **tree), prompt().repeat(1, 3), Transcript()
    heads.on_round = lambda one: said.add_round(one, 1.0)
    text = plain(shared_target(), ids, 33, assistant_model=heads)
    stats = heads.last_stats
    assert said.token_ids == text[0, ids.shape[1] :].tolist()
    assert len(said.positions) == len(said.round_of) == 33
    assert said.forwards == stats.target_forwards
    drafted = [n for n, depth in zip(stats.num_accepted[0], stats.offered[0], strict=True) if depth]
    assert said.num_accepted == drafted and sum(drafted) > 0
    assert said.pos_acc == pytest.approx(stats.pos_acc)
    assert [said.positions[one.first : one.first + one.num_drafted] for one in said.rounds] == [
        list(range(1, one.num_drafted + 1)) for one in said.rounds
    ]
