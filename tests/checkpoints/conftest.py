"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest

from hf_specheads.checkpoints.layouts.eagle import absorb


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text on which an absorbed bias is measured need not be long here."""
    monkeypatch.setattr(absorb, "MEASURED_ROWS", 40)
