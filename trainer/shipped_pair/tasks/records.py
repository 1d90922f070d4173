"""Kinds of records: typed fields, and a sentence that states their values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .draw import Draw
from .words import CITIES, COLOURS, FIRST_NAMES, THINGS, TOPICS

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip


def time_of_day(draw: Draw) -> str:
    """Draws a time such as 09:35, in steps of five minutes."""
    return f"{draw.number(7, 20):02}:{5 * draw.number(0, 11):02}"


def code(draw: Draw) -> str:
    """Draws a code such as KX-482, random letters and digits that can only be copied."""
    return "".join(draw.random.choice("ABCDEFGHKLMNPRSTVWXYZ") for _ in range(2)) + f"-{draw.number(100, 999)}"


VALUES: dict[str, Callable[[Draw], Any]] = {
    "person": Draw.person,
    "first": lambda draw: draw.word(FIRST_NAMES),
    "city": lambda draw: draw.word(CITIES),
    "thing": lambda draw: draw.word(THINGS),
    "colour": lambda draw: draw.word(COLOURS),
    "topic": lambda draw: draw.word(TOPICS),
    "firm": Draw.firm,
    "code": code,
    "day": lambda draw: draw.choice(DAYS),
    "month": lambda draw: draw.choice(MONTHS),
    "time": time_of_day,
    "few": lambda draw: draw.number(2, 12),
    "age": lambda draw: draw.number(18, 79),
    "count": lambda draw: draw.number(10, 400),
    "price": lambda draw: draw.number(2, 90) + draw.choice((0.25, 0.5, 0.75, 0.95)),
    "flag": lambda draw: draw.random.random() < 0.5,
}


@dataclass(frozen=True)
class RecordKind:
    """A kind of record.

    Attributes:
        name: Plural name of the records.
        fields: Kinds of values by key, see [`VALUES`].
        told: Sentence that states all fields, with `{key}` placeholders.
        yes, no: Wordings of a `flag` in the sentence.
    """

    name: str
    fields: dict[str, str]
    told: str
    yes: str = "yes"
    no: str = "no"

    @property
    def keys(self) -> list[str]:
        """Names of the fields."""
        return list(self.fields)

    def draw(self, draw: Draw) -> dict[str, Any]:
        """Draws one record."""
        return {key: VALUES[kind](draw) for key, kind in self.fields.items()}

    def said(self, value: Any) -> str:
        """Returns a field's value as text."""
        if isinstance(value, bool):
            return self.yes if value else self.no
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    def sentence(self, row: dict[str, Any]) -> str:
        """Returns the record as a sentence."""
        return self.told.format(**{key: self.said(value) for key, value in row.items()})

    def lines(self, draw: Draw, row: dict[str, Any]) -> str:
        """Returns the record as lines `key: value`, in random order."""
        said = {True: "yes", False: "no"}
        lines = [
            f"{key}: {said[value] if isinstance(value, bool) else self.said(value)}" for key, value in row.items()
        ]
        draw.random.shuffle(lines)
        return "\n".join(lines)


KINDS = (
    RecordKind(
        "people",
        {"name": "person", "age": "age", "city": "city", "employer": "firm", "member": "flag"},
        "{name} is {age} years old, lives in {city}, works for {employer} and {member}.",
        "is a member",
        "is not a member",
    ),
    RecordKind(
        "purchases",
        {"buyer": "person", "product": "thing", "colour": "colour", "quantity": "few", "price": "price"},
        "{buyer} bought {quantity} {colour} pieces of the product {product} at {price} euros each.",
    ),
    RecordKind(
        "trips",
        {"traveller": "person", "start": "city", "destination": "city", "day": "day", "departure": "time"},
        "{traveller} travels from {start} to {destination} on {day}, leaving at {departure}.",
    ),
    RecordKind(
        "meetings",
        {"topic": "topic", "host": "person", "day": "day", "time": "time", "room": "code"},
        "The meeting about {topic} is hosted by {host} on {day} at {time} in room {room}.",
    ),
    RecordKind(
        "deliveries",
        {"code": "code", "item": "thing", "receiver": "first", "city": "city", "weight": "few", "express": "flag"},
        "Delivery {code} brings a {item} to {receiver} in {city}, weighs {weight} kg and {express}.",
        "is sent by express",
        "is sent by normal mail",
    ),
    RecordKind(
        "courses",
        {"course": "topic", "teacher": "person", "month": "month", "seats": "count", "fee": "price"},
        "The course on {course} by {teacher} starts in {month}, has {seats} seats and costs {fee} euros.",
    ),
    RecordKind(
        "rentals",
        {"tenant": "person", "object": "thing", "days": "few", "deposit": "count", "city": "city"},
        "{tenant} rents the {object} in {city} for {days} days with a deposit of {deposit} euros.",
    ),
    RecordKind(
        "stocks",
        {"product": "thing", "colour": "colour", "stock": "count", "shelf": "code", "supplier": "firm"},
        "There are {stock} units of the {colour} {product} on shelf {shelf}, supplied by {supplier}.",
    ),
)
