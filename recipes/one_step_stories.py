"""The embedded sample's stories of one step of arithmetic, each told in several ways."""

from lazytrain.recipes.story import (
    Step,
    Story,
    Telling,
    draw_add,
    draw_differ,
    draw_divide,
    draw_multiply,
    draw_subtract,
)

ONE_STEP_STORIES: tuple[Story, ...] = (
    Story(
        "gain",
        (Step("+", 1),),
        (0, 1),
        draw_add,
        (
            Telling(
                "{n} has {a} {o}. {P} buys {b} more.",
                "How many {o} does {p} have now?",
                "Now {p} has {r} {o}.",
                (
                    "If {n} has {a} {o} and buys {b} more, how many {o} does {p} have in total?",
                    "After buying {b} more {o}, how many {o} does {n} have if {p} had {a} before?",
                ),
                ("{n} has {eq} {o} now.",),
            ),
            Telling(
                "{n} had {a} {o}. Then {m} gave {n} {b} {o}.",
                "How many {o} does {n} have?",
                "Now {n} has {r} {o}.",
                (
                    "How many {o} does {n} have if {p} had {a} and got {b} from {m}?",
                    "{m} gives {b} {o} to {n}, who had {a} before. What is the number of {o} that {n} has now?",
                ),
                ("In total {n} has {eq} {o}.",),
            ),
        ),
    ),
    Story(
        "loss",
        (Step("-", 1),),
        (0, 1),
        draw_subtract,
        (
            Telling(
                "{n} has {a} {o}. {P} gives {b} to {m}.",
                "How many {o} does {n} have left?",
                "{n} has {r} {o} left.",
                (
                    "If {n} gives {b} of {q} {a} {o} to {m}, how many {o} does {p} keep?",
                    "How many {o} are left for {n} after {p} gives {b} of {a} {o} to {m}?",
                ),
                ("{n} has {eq} {o} left.",),
            ),
            Telling(
                "{n} had {a} {o}. {P} lost {b} of them.",
                "How many {o} are left?",
                "Now {r} {o} are left.",
                (
                    "How many {o} does {n} have after losing {b} of {q} {a} {o}?",
                    "If {n} loses {b} {o} and had {a} before, what is the number of {o} left?",
                ),
                ("There are {eq} {o} left.",),
            ),
        ),
    ),
    Story(
        "groups",
        (Step("*", 1),),
        (0, 1),
        draw_multiply,
        (
            Telling(
                "{n} has {a} {g}. There are {b} {o} in each.",
                "How many {o} does {n} have?",
                "In total {p} has {r} {o}.",
                (
                    "How many {o} are in the {a} {g} of {n} if each of them holds {b} {o}?",
                    "If there are {b} {o} in each of the {a} {g} that {n} has, how many {o} does {p} have?",
                ),
                ("{n} has {eq} {o}.",),
            ),
            Telling(
                "{n} buys {a} {g} of {b} {o} each.",
                "How many {o} does {p} buy?",
                "In total {p} buys {r} {o}.",
                (
                    "What is the number of {o} that {n} gets by buying {a} {g} of {b} {o} each?",
                    "If each of the {a} {g} that {n} buys holds {b} {o}, how many {o} does {p} get?",
                ),
                ("In total there are {eq} {o}.",),
            ),
        ),
    ),
    Story(
        "share",
        (Step("/", 1),),
        (0, 1),
        draw_divide,
        (
            Telling(
                "{n} shares {a} {o} equally among {b} friends.",
                "How many {o} does each friend get?",
                "Each friend gets {r} {o}.",
                (
                    "If {b} friends get an equal share of the {a} {o} that {n} has, how many {o} does each get?",
                    "How many {o} go to each friend when {n} shares {a} {o} equally among {b} of them?",
                ),
                ("Each friend gets {eq} {o}.",),
            ),
            Telling(
                "{n} puts {a} {o} equally into {b} {g}.",
                "How many {o} are in each?",
                "There are {r} {o} in each.",
                (
                    "If {n} fills {b} {g} equally with {a} {o}, how many {o} does each hold?",
                    "What is the number of {o} in each of {b} {g} when {n} puts {a} {o} equally into them?",
                ),
                ("There are {eq} {o} in each.",),
            ),
        ),
    ),
    Story(
        "more",
        (Step("+", 1),),
        (0, 1),
        draw_add,
        (
            Telling(
                "{n} has {a} {o}. {m} has {b} more {o} than {n}.",
                "How many {o} does {m} have?",
                "{m} has {r} {o}.",
                (
                    "How many {o} does {m} have if {n} has {a} {o} and {m} has {b} more than {n}?",
                    "{m} has {b} more {o} than {n}. If {n} has {a}, what is the number of {o} that {m} has?",
                ),
                ("{m} has {eq} {o}.",),
            ),
            Telling(
                "{n} is {a} years old. {m} is {b} years older than {n}.",
                "How old is {m}?",
                "{m} is {r} years old.",
                (
                    "How old is {m}, who is {b} years older than {n}, if {n} is {a} years old?",
                    "If {n} is {a} and {m} is {b} years older, what is the age of {m} in years?",
                ),
                ("{m} is {eq} years old.",),
            ),
        ),
    ),
    Story(
        "difference",
        (Step("-", 1),),
        (0, 1),
        draw_differ,
        (
            Telling(
                "{n} has {a} {o}. {m} has {b} {o}.",
                "How many more {o} does {n} have than {m}?",
                "{n} has {r} more {o} than {m}.",
                (
                    "If {m} has {b} {o} and {n} has {a}, how many more {o} does {n} have?",
                    "How many {o} does {m} need to have as many as {n}, if {m} has {b} and {n} has {a}?",
                ),
                ("{n} has {eq} more {o}.",),
            ),
            Telling(
                "{n} read {a} pages on Monday and {b} pages on Tuesday.",
                "How many more pages did {p} read on Monday?",
                "On Monday {p} read {r} more pages.",
                (
                    "How many more pages did {n} read on Monday if {p} read {a} pages then and {b} on Tuesday?",
                    "On Tuesday {n} read {b} pages and on Monday {a}. What is the difference in pages?",
                ),
                ("{n} read {eq} more pages.",),
            ),
        ),
    ),
    Story(
        "price",
        (Step("*", 1),),
        (0, 1),
        draw_multiply,
        (
            Telling(
                "{n} buys {a} {o}. Each costs ${b}.",
                "How many dollars does {p} pay?",
                "In total {p} pays ${r}.",
                (
                    "What is the total cost in dollars if {n} buys {a} {o} at ${b} each?",
                    "If each costs ${b}, how many dollars does {n} pay for {a} {o}?",
                ),
                ("{n} pays {eq} dollars.",),
            ),
            Telling(
                "{n} works {a} hours and earns ${b} an hour.",
                "How many dollars does {p} earn?",
                "In total {p} earns ${r}.",
                (
                    "How many dollars does {n} get for {a} hours of work at ${b} an hour?",
                    "If {n} earns ${b} an hour and works {a} hours, what is the total in dollars?",
                ),
                ("{n} earns {eq} dollars.",),
            ),
        ),
    ),
)
