"""Endless, seeded chat corpus for the tiny pairs: twelve kinds of question, each answered in a fixed form.

Every text is generated from the words and templates below, so no licence applies. A question determines its answer,
except in `story`. A story has several right continuations, which tests of sampling need.

This module uses no tokenizer and no model.
"""

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple


def words(text: str) -> list[str]:
    return text.split()


def pairs(text: str) -> dict[str, str]:
    return dict(word.split(":") for word in text.split())


NAMES = words(
    """
    Ada Alan Anna Ben Carla Dana Eric Fiona Grace Hugo Ivan Jane Kurt Lena Marco Nora Omar Paula Ravi Sara Tom
    Una Vera Will
    """
)
THINGS = words(
    "apples books boxes cards coins cups eggs keys lemons nuts pears pens plums roses shells stamps stones toys"
)
COLOURS = words("black blue brown green orange pink purple red white yellow")
JOBS = words("baker doctor driver farmer lawyer nurse painter pilot singer teacher writer")
PLACES = ["a bridge", "a castle", "a forest", "a garden", "a harbour", "a market", "a museum", "a river"]
WORDS = words(
    """
    anchor basket bridge butter candle castle circle dragon falcon forest garden hammer island kitten ladder
    letter market mirror monkey number orange palace pencil planet rabbit rocket silver spring summer turtle
    window winter
    """
)
CAPITALS = pairs(
    """
    Austria:Vienna Canada:Ottawa Cuba:Havana Egypt:Cairo France:Paris Germany:Berlin Greece:Athens India:Delhi
    Ireland:Dublin Italy:Rome Japan:Tokyo Kenya:Nairobi Norway:Oslo Peru:Lima Poland:Warsaw Portugal:Lisbon
    Spain:Madrid Vietnam:Hanoi
    """
)
ARGUMENTS = words("count first height last left price right size total value weight width")
FIELDS = pairs(
    """
    age:int city:str color:str email:str height:float name:str owner:str price:float score:float size:int
    title:str weight:float width:int year:int
    """
)
OPERATIONS = {
    "add": ("+", "sum"),
    "subtract": ("-", "difference"),
    "multiply": ("*", "product"),
    "divide": ("/", "quotient"),
}
DIGIT_NAMES = ("Ones", "Tens", "Hundreds", "Thousands")


class Exchange(NamedTuple):
    """One prompt with its answer."""

    task: str
    prompt: str
    answer: str


def in_words(items: list[str]) -> str:
    """Join items as `a`, `a and b`, or `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def addition(random: Random) -> tuple[str, str]:
    n_digits = random.choice((2, 3, 3))
    a, b = (random.randrange(10 ** (n_digits - 1), 10**n_digits) for _ in range(2))
    ask = random.choice(
        ("What is {} + {}?", "Add {} and {}.", "Compute {} + {} step by step.", "How much is {} plus {}?")
    )
    lines, carry = [f"Let us add {a} and {b}, digit by digit."], 0
    for i in range(n_digits):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        lines.append(f"{DIGIT_NAMES[i]}: {x} + {y}{carried} = {total}, write {total % 10}, carry {carry}.")
    lines.append(f"The answer is {a + b}.")
    return ask.format(a, b), "\n".join(lines)


def word_problem(random: Random) -> tuple[str, str]:
    (who, friend), thing = random.sample(NAMES, 2), random.choice(THINGS)
    start, more = random.randrange(10, 60), random.randrange(2, 40)
    total = start + more
    gone = random.randrange(1, min(total, 40))
    ask = random.choice(
        (
            f"{who} has {start} {thing}, buys {more} more and gives {gone} to {friend}. How many {thing} are left?",
            f"{who} had {start} {thing}. {who} found {more} more, then gave {gone} to {friend}. How many now?",
        )
    )
    return ask, (
        f"Let us solve this step by step.\n1. {who} starts with {start} {thing}.\n"
        f"2. {who} gets {more} more {thing}: {start} + {more} = {total}.\n"
        f"3. {who} gives {gone} {thing} to {friend}: {total} - {gone} = {total - gone}.\n"
        f"So {who} has {total - gone} {thing} left.\nThe answer is {total - gone}."
    )


def counting(random: Random) -> tuple[str, str]:
    start, step, n = random.randrange(60), random.choice((1, 1, 2, 3, 5, 10)), random.randrange(8, 21)
    stop = start + step * (n - 1)
    ask = random.choice(("Count from {} to {} by {}.", "List the numbers from {} to {} in steps of {}."))
    numbers = ", ".join(str(start + step * i) for i in range(n))
    return ask.format(
        start, stop, step
    ), f"Here are the numbers:\n{numbers}\nThe first is {start} and the last is {stop}."


def times_table(random: Random) -> tuple[str, str]:
    a, n = random.randrange(2, 13), random.randrange(5, 13)
    ask = random.choice(("Show the multiplication table of {} up to {}.", "Write the {} times table up to {}."))
    lines = "\n".join(f"{a} x {i} = {a * i}" for i in range(1, n + 1))
    return ask.format(a, n), f"Here is the multiplication table of {a}:\n{lines}"


def json_record(random: Random) -> tuple[str, str]:
    name, age, job = random.choice(NAMES), random.randrange(18, 80), random.choice(JOBS)
    country, likes = random.choice(list(CAPITALS)), random.sample(THINGS, random.randrange(2, 4))
    colour = random.choice(COLOURS)
    ask = random.choice(
        (
            "Make a JSON record for {}, age {}, a {} from {} who likes {}. Favourite colour: {}.",
            "Write this person as JSON: {}, {}, {}, lives in {}, likes {}, favourite colour {}.",
        )
    )
    home = {"city": CAPITALS[country], "country": country}
    record = {
        "name": name,
        "age": age,
        "job": job,
        "home": home,
        "likes": likes,
        "favourite_colour": colour,
        "active": True,
    }
    return ask.format(name, age, job, country, in_words(likes), colour), f"```json\n{json.dumps(record, indent=2)}\n```"


def python_function(random: Random) -> tuple[str, str]:
    verb, arguments = random.choice(list(OPERATIONS)), random.sample(ARGUMENTS, random.choice((2, 2, 3)))
    sign, noun = OPERATIONS[verb]
    name = f"{verb}_{random.choice(('items', 'numbers', 'values'))}"
    ask = random.choice(
        (
            "Write a Python function {} that returns the {} of {}.",
            "I need a Python function called {}. It should return the {} of {}.",
        )
    )
    signature = ", ".join(f"{argument}: int" for argument in arguments)
    return ask.format(name, noun, in_words(arguments)), (
        f"Here is the function:\n```python\ndef {name}({signature}) -> int:\n"
        f'    """Return the {noun} of {in_words(arguments)}."""\n'
        f"    result = {f' {sign} '.join(arguments)}\n    return result\n```\n"
        f"Call it like this: `{name}({', '.join(arguments)})`."
    )


def python_class(random: Random) -> tuple[str, str]:
    name = random.choice(["Animal", "Book", "Car", "House", "Item", "Order", "Person", "Player", "Product", "Ticket"])
    fields = random.sample(list(FIELDS), random.randrange(2, 5))
    ask = random.choice(("Write a Python class {} with the fields {}.", "Define a {} class in Python that has {}."))
    signature = ", ".join(f"{field}: {FIELDS[field]}" for field in fields)
    assignments = "\n".join(f"        self.{field} = {field}" for field in fields)
    shown = ", ".join(f"{field}={{self.{field}}}" for field in fields)
    return ask.format(name, in_words(fields)), (
        f"```python\nclass {name}:\n    def __init__(self, {signature}) -> None:\n{assignments}\n\n"
        f'    def __repr__(self) -> str:\n        return f"{name}({shown})"\n```'
    )


def spelling(random: Random) -> tuple[str, str]:
    words = random.sample(WORDS, 2)
    ask = random.choice(("Spell the words {} and {}.", "How do you spell {} and {}?"))
    lines = (f'The word "{word}" has {len(word)} letters: {" - ".join(word.upper())}.' for word in words)
    return ask.format(*words), "\n".join(lines)


def capitals(random: Random) -> tuple[str, str]:
    countries = random.sample(list(CAPITALS), random.randrange(2, 5))
    ask = random.choice(("What are the capitals of {}?", "Tell me the capitals of {}."))
    lines = "\n".join(f"- The capital of {country} is {CAPITALS[country]}." for country in countries)
    return ask.format(in_words(countries)), f"Here are the capitals:\n{lines}"


def html_list(random: Random) -> tuple[str, str]:
    title, items = (
        random.choice(["Favourites", "Inventory", "Shopping", "Wishlist"]),
        random.sample(THINGS, random.randrange(3, 7)),
    )
    ask = random.choice(("Write an HTML list titled {} with {}.", "Make an HTML section called {} that lists {}."))
    lines = "\n".join(f"    <li>{item}</li>" for item in items)
    page = f"<section>\n  <h1>{title}</h1>\n  <ul>\n{lines}\n  </ul>\n</section>"
    return ask.format(title, in_words(items)), f"```html\n{page}\n```"


def sorting(random: Random) -> tuple[str, str]:
    numbers = random.sample(range(1, 100), random.randrange(4, 8))
    ask = random.choice(("Sort these numbers: {}.", "Put {} in order from small to large."))
    ordered = sorted(numbers)
    return ask.format(", ".join(map(str, numbers))), (
        f"The sorted numbers are: {', '.join(map(str, ordered))}.\n"
        f"The smallest is {ordered[0]} and the largest is {ordered[-1]}."
    )


def story(random: Random) -> tuple[str, str]:
    who, friend = random.sample(NAMES, 2)
    job, city = random.choice(JOBS), random.choice(list(CAPITALS.values()))
    when, place = random.choice(("One morning", "One day", "Last winter", "In the spring")), random.choice(PLACES)
    found, wanted = random.sample(THINGS, 2)
    ask = random.choice(("Tell a short story about {}, a {} in {}.", "Write a story: {} is a {} from {}."))
    return ask.format(who, job, city), (
        f"{who} was a {job} who lived in {city}. {when}, {who} went to {place} and found a box of {found}. "
        f'"What should I do with these {found}?" said {who}. {who} met a friend called {friend}, and {friend} said, '
        f'"Let us sell the {found} and buy {wanted}." So {who} and {friend} sold the {found} and bought {wanted}. '
        f"In the end, {who} the {job} was very happy in {city}."
    )


Task = Callable[[Random], tuple[str, str]]
TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        addition, word_problem, counting, times_table, json_record, python_function,
        python_class, spelling, capitals, html_list, sorting, story,
    )
}  # fmt: skip


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt is excluded from training: about one in sixteen is, by a hash of its text."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 16 == 0


def draw(random: Random, *, held_out: bool = False, task: str | None = None) -> Exchange:
    """Draw an exchange from the training part or the held-out part; `task`: a key of `TASKS`, random by default."""
    while True:
        name = task or random.choice(list(TASKS))
        prompt, answer = TASKS[name](random)
        if is_held_out(prompt) == held_out:
            return Exchange(name, prompt, answer)
