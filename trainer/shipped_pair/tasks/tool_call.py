"""Tool calls written from a question, or answers written from a tool's result."""

import json
import re
from dataclasses import dataclass
from typing import Any

from .draw import Draw
from .example import Family, Written, say, wording_problem
from .records import VALUES

CALL = re.compile(r"(.*)\n<tool_call>\n(.*)\n</tool_call>")
CLOSINGS = (" Can I help you with anything else?", " Tell me if you need something else.")
TYPES = {"age": "integer", "few": "integer", "count": "integer", "price": "number"}


@dataclass(frozen=True)
class Tool:
    """A tool, with questions that need it.

    Attributes:
        name, description: Name and description in the schema.
        arguments: Kinds of values by argument; see `records.VALUES`.
        result: Kinds of values by key of the result.
        asks: Questions, with `{argument}` placeholders.
        told: Wordings of the answer, with placeholders for arguments and result.
    """

    name: str
    description: str
    arguments: dict[str, str]
    result: dict[str, str]
    asks: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the function, in the format of chat templates."""
        properties = {name: {"type": TYPES.get(kind, "string")} for name, kind in self.arguments.items()}
        parameters = {"type": "object", "properties": properties}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_forecast",
        "Weather of a city on a day",
        {"city": "city", "day": "day", "time": "time"},
        {"sky": "colour", "degrees": "few", "wind_kmh": "age"},
        (
            "What will the weather be in {city} on {day} at {time}?",
            "Weather for {city}, {day}, {time}, please.",
            "I am in {city} on {day} at {time}. How is the weather then?",
            "Check the weather at {time} on {day} in {city}.",
            "Can you tell me about {day}, {time}, in {city}? I mean the weather.",
            "On {day} I go to {city}. Which weather is there at {time}?",
            "Will it rain in {city} on {day} at {time}?",
            "Give me the weather: {city}, {day}, {time}.",
            "How warm is it in {city} at {time} on {day}?",
            "I ask for the weather of {day} at {time} in {city}.",
        ),
        (
            "In {city} the sky is {sky} on {day} at {time}, with {degrees} degrees and a wind of {wind_kmh} km/h.",
            "On {day} at {time} it has {degrees} degrees in {city}, a {sky} sky and a wind of {wind_kmh} km/h.",
        ),
    ),
    Tool(
        "book_table",
        "Books seats for a guest",
        {"guest": "person", "place": "firm", "day": "day", "time": "time", "seats": "few"},
        {"number": "code", "desk": "count"},
        (
            "Book {seats} seats at {place} for {guest}, {day} at {time}.",
            "{guest} wants {seats} seats at {place} on {day}, {time}. Please book.",
            "Please reserve on {day} at {time} at {place}: {seats} seats, name {guest}.",
            "A booking at {place}: {guest}, {seats} seats, {day}, {time}.",
            "Could you get {guest} {seats} seats at {place} for {day} at {time}?",
            "I want to book {seats} seats for {guest}. Place {place}, {day}, {time}.",
            "On {day} at {time}, {guest} needs {seats} seats at {place}.",
            "Reserve {seats} seats for {guest} at {place} on {day}, {time}.",
            "Seats at {place}, please: {seats} for {guest}, {day} at {time}.",
            "Get a table for {guest} at {place}: {seats} seats, {time} on {day}.",
        ),
        (
            "I booked {seats} seats at {place} for {guest} on {day} at {time}. Booking {number}, desk {desk}.",
            "{guest} has {seats} seats at {place} on {day} at {time}, with booking {number} at desk {desk}.",
        ),
    ),
    Tool(
        "find_train",
        "Next train between two cities",
        {"start": "city", "destination": "city", "day": "day", "after": "time"},
        {"train": "code", "departure": "time", "track": "few", "price": "price"},
        (
            "Find a train from {start} to {destination} on {day} after {after}.",
            "I travel from {start} to {destination}, {day}, not before {after}. Which train?",
            "Train {start} to {destination}, {day}, after {after}, please.",
            "On {day} after {after}, which train goes from {start} to {destination}?",
            "How can I go by train to {destination} from {start} on {day}, later than {after}?",
            "Is there a train from {start} to {destination} after {after} on {day}?",
            "I need the next train to {destination}. I am in {start} on {day} after {after}.",
            "From {start} I go to {destination} on {day}. Which train leaves after {after}?",
            "Next train, please: {start} to {destination}, {day}, after {after}.",
            "Show me a train on {day}, after {after}, that goes from {start} to {destination}.",
        ),
        (
            "Train {train} from {start} to {destination} leaves at {departure} from track {track} for {price} euros.",
            "Take train {train} at {departure} from {start}, track {track}. To {destination} it costs {price} euros.",
        ),
    ),
    Tool(
        "check_stock",
        "Stock of a product in a shop",
        {"product": "thing", "colour": "colour", "shop": "firm"},
        {"units": "count", "price": "price", "shelf": "code"},
        (
            "Does {shop} have a {colour} {product}?",
            "How many of the {product} in {colour} are there at {shop}?",
            "Check the stock of the {colour} {product} in the shop {shop}.",
            "I look for a {colour} {product}. What about {shop}?",
            "Shop {shop}: is there a {product} in {colour}?",
            "I want to buy a {colour} {product}. Does {shop} have one?",
            "Please ask {shop} about the {product} in {colour}.",
            "Is the {colour} {product} in stock at {shop}?",
            "What does {shop} have of the {colour} {product}?",
            "Find out if {shop} sells the {product} in {colour}.",
        ),
        (
            "{shop} has {units} units of the {colour} {product} on shelf {shelf}, at {price} euros each.",
            "There are {units} units of the {colour} {product} at {shop}, shelf {shelf}, for {price} euros each.",
        ),
    ),
    Tool(
        "send_message",
        "Sends a message to a person",
        {"receiver": "person", "topic": "topic", "day": "day", "city": "city"},
        {"id": "code", "sent_at": "time", "length": "count"},
        (
            "Write to {receiver} that the {topic} day is on {day} in {city}.",
            "Tell {receiver}: {topic} on {day}, in {city}.",
            "Please let {receiver} know about {topic} in {city} on {day}.",
            "Send word to {receiver}. On {day} there is {topic} in {city}.",
            "{receiver} should hear that {topic} takes place in {city} on {day}.",
            "Send {receiver} a message about {topic} on {day} in {city}.",
            "Message to {receiver}: {topic}, {day}, {city}.",
            "Inform {receiver} of the {topic} day, {day} in {city}.",
            "I want {receiver} to know that {topic} is on {day} in {city}.",
            "Say to {receiver} that on {day} there is {topic} in {city}.",
        ),
        (
            "I told {receiver} at {sent_at} about {topic} in {city} on {day}: message {id}, {length} letters.",
            "Message {id} of {length} letters about {topic} on {day} in {city} went to {receiver} at {sent_at}.",
        ),
    ),
)


def _said(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write(draw: Draw) -> Written:
    """Writes a question whose answer is a call of one of two tools, or the answer to a question after the tool's
    result."""
    tool, other = draw.random.sample(TOOLS, 2)
    answers = draw.random.random() < 0.5
    tools = [tool.schema] if answers else draw.random.sample([tool.schema, other.schema], 2)
    arguments = {name: VALUES[kind](draw) for name, kind in tool.arguments.items()}
    question = draw.phrasing(tool.name, tool.asks).format(**arguments)
    call = {"name": tool.name, "arguments": arguments}
    announced = f"I will use the tool {tool.name} for this."
    calling = {"role": "assistant", "content": announced, "tool_calls": [{"type": "function", "function": call}]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}, calling]
    if not answers:
        return Written(messages, {"call": call, "announced": announced}, tools)
    result = {key: VALUES[kind](draw) for key, kind in tool.result.items()}
    said = {key: _said(value) for key, value in {**arguments, **result}.items()}
    parts = [[told.format(**said) for told in tool.told], list(CLOSINGS)]
    messages.append({"role": "tool", "name": tool.name, "content": json.dumps(result)})
    messages.append({"role": "assistant", "content": say(draw, parts)})
    return Written(messages, {"parts": parts}, tools)


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Parses the call and compares name and arguments, or checks that the answer states arguments and result."""
    if "parts" in facts:
        return wording_problem(facts["parts"], answer)
    match = CALL.fullmatch(answer)
    if match is None or match[1] != facts["announced"]:
        return f"the answer {answer!r} is not {facts['announced']!r} and one tool call."
    try:
        call = json.loads(match[2])
    except ValueError as error:
        return f"the call does not parse: {error}."
    same = json.dumps(call, sort_keys=True) == json.dumps(facts["call"], sort_keys=True)
    return None if same else f"the call is {call}, not {facts['call']}."


FAMILY = Family("tool call", write, problem, weight=2)
