"""The embedded sample's stories of two steps of arithmetic, each told in several ways."""

from lazytrain.recipes.story import (
    Step,
    Story,
    Telling,
    draw_add_add,
    draw_add_self,
    draw_add_subtract,
    draw_divide_add,
    draw_multiply_add,
    draw_multiply_change,
    draw_multiply_subtract,
    draw_subtract_add,
    draw_subtract_divide,
)

TWO_STEP_STORIES: tuple[Story, ...] = (
    Story(
        "gain_loss",
        (Step("+", 1), Step("-", 2)),
        (0, 1, 2),
        draw_add_subtract,
        (
            Telling(
                "{n} has {a} {o}. {P} buys {b} more and gives {c} to {m}.",
                "How many {o} does {n} have now?",
                "Now {n} has {r} {o}.",
                (
                    "If {n} has {a} {o}, buys {b} more and then gives {c} to {m}, how many {o} does {p} keep?",
                    "How many {o} does {n} have after buying {b}, if {p} had {a} before and gives {c} to {m}?",
                ),
                ("With the new ones {n} has {eq} {o}.", "Then {p} has {eq} {o} left."),
            ),
            Telling(
                "{n} had {a} {o}. {P} found {b} more. Then {p} lost {c}.",
                "How many {o} are left?",
                "Now {r} {o} are left.",
                (
                    "If {n} had {a} {o}, found {b} and lost {c}, what is the number of {o} left?",
                    "How many {o} does {n} have if {p} lost {c} after finding {b} and had {a} before?",
                ),
                ("First {n} had {eq} {o}.", "Then {eq} {o} are left."),
            ),
        ),
    ),
    Story(
        "loss_gain",
        (Step("-", 1), Step("+", 2)),
        (0, 1, 2),
        draw_subtract_add,
        (
            Telling(
                "A bus has {a} people. Then {b} get off and {c} get on.",
                "How many people are on the bus now?",
                "Now {r} people are on the bus.",
                (
                    "If {b} of {a} people get off a bus and {c} get on, how many people are on it?",
                    "How many people are on a bus that had {a} people before {b} got off and {c} got on?",
                ),
                ("First {eq} people are left.", "Then there are {eq} people."),
            ),
            Telling(
                "{n} has {a} {o}. {P} gives {b} to {m} and buys {c} more.",
                "How many {o} does {n} have now?",
                "Now {n} has {r} {o}.",
                (
                    "If {n} has {a} {o}, gives {b} to {m} and then buys {c}, how many {o} does {p} have?",
                    "How many {o} does {n} have after giving {b} of {a} {o} to {m} and buying {c} more?",
                ),
                ("First {n} has {eq} {o} left.", "Then {p} has {eq} {o}."),
            ),
        ),
    ),
    Story(
        "three_parts",
        (Step("+", 1), Step("+", 2)),
        (0, 1, 2),
        draw_add_add,
        (
            Telling(
                "{n} picks {a} {o}, {m} picks {b} and a friend picks {c}.",
                "How many {o} do they pick?",
                "In total they pick {r} {o}.",
                (
                    "What is the total number of {o} if {n} picks {a}, {m} picks {b} and a friend picks {c}?",
                    "If {n}, {m} and a friend pick {a}, {b} and {c} {o}, how many {o} do they have together?",
                ),
                ("{n} and {m} pick {eq} {o}.", "In total there are {eq} {o}."),
            ),
            Telling(
                "{n} has {a} red, {b} blue and {c} green {o}.",
                "How many {o} does {n} have?",
                "In total {n} has {r} {o}.",
                (
                    "How many {o} does {n} have if {a} are red, {b} are blue and {c} are green?",
                    "If {a} {o} are red, {b} are blue and {c} are green, what is the number of {o} that {n} has?",
                ),
                ("The red and blue ones are {eq}.", "In total there are {eq} {o}."),
            ),
        ),
    ),
    Story(
        "together",
        (Step("+", 1), Step("+", 0)),
        (1,),
        draw_add_self,
        (
            Telling(
                "{n} has {a} {o}. {m} has {b} more than {n}.",
                "How many {o} do they have together?",
                "Together they have {r} {o}.",
                (
                    "If {m} has {b} more {o} than {n} and {n} has {a}, how many {o} do both have together?",
                    "What is the total number of {o} of {n}, who has {a}, and {m}, who has {b} more than {n}?",
                ),
                ("{m} has {eq} {o}.", "Together they have {eq} {o}."),
            ),
            Telling(
                "{n} ran {a} miles on Monday and {b} miles more than that on Tuesday.",
                "How many miles did {p} run on both days?",
                "On both days {p} ran {r} miles.",
                (
                    "How many miles did {n} run in total if {p} ran {a} on Monday and {b} more than that on Tuesday?",
                    "On Tuesday {n} ran {b} miles more than the {a} miles of Monday. What is the total in miles?",
                ),
                ("On Tuesday {p} ran {eq} miles.", "In total {p} ran {eq} miles."),
            ),
        ),
    ),
    Story(
        "groups_gain",
        (Step("*", 1), Step("+", 2)),
        (0, 1, 2),
        draw_multiply_add,
        (
            Telling(
                "{n} has {a} {g} with {b} {o} each. {P} finds {c} more {o}.",
                "How many {o} does {p} have now?",
                "Now {p} has {r} {o}.",
                (
                    "How many {o} does {n} have if {p} has {a} {g} with {b} {o} each and finds {c} more?",
                    "If {n} finds {c} {o} and has {a} {g} with {b} {o} each, how many {o} does {p} have?",
                ),
                ("The {g} hold {eq} {o}.", "In total there are {eq} {o}."),
            ),
            Telling(
                "{n} buys {a} {g} of {b} {o} each and {c} single {o}.",
                "How many {o} does {p} buy?",
                "In total {p} buys {r} {o}.",
                (
                    "If {n} buys {c} single {o} and {a} {g} of {b} {o} each, how many {o} does {p} get?",
                    "What is the total number of {o} if {n} buys {a} {g} of {b} {o} each and {c} single ones?",
                ),
                ("The {g} hold {eq} {o}.", "With the single ones there are {eq} {o}."),
            ),
        ),
    ),
    Story(
        "groups_loss",
        (Step("*", 1), Step("-", 2)),
        (0, 1, 2),
        draw_multiply_subtract,
        (
            Telling(
                "{n} has {a} {g} with {b} {o} each. {P} gives {c} {o} to {m}.",
                "How many {o} does {n} have left?",
                "{n} has {r} {o} left.",
                (
                    "If {n} has {a} {g} with {b} {o} each and gives {c} {o} to {m}, how many {o} does {p} keep?",
                    "How many {o} are left for {n} after giving {m} {c} {o} from {a} {g} with {b} each?",
                ),
                ("The {g} hold {eq} {o}.", "Then {n} has {eq} {o} left."),
            ),
            Telling(
                "There are {a} rows of {b} chairs. {n} takes {c} chairs away.",
                "How many chairs are left?",
                "Now {r} chairs are left.",
                (
                    "How many chairs are left if {n} takes {c} chairs away from {a} rows of {b} chairs?",
                    "If {n} takes {c} chairs away and there were {a} rows of {b} chairs, how many are left?",
                ),
                ("The rows have {eq} chairs.", "Then {eq} chairs are left."),
            ),
        ),
    ),
    Story(
        "change",
        (Step("*", 1), Step("-", 2, reverse=True)),
        (0, 1, 2),
        draw_multiply_change,
        (
            Telling(
                "{n} has ${c} and buys {a} {o} at ${b} each.",
                "How many dollars does {p} have left?",
                "Now {p} has ${r} left.",
                (
                    "How many dollars of ${c} are left after {n} buys {a} {o} at ${b} each?",
                    "If {n} buys {a} {o} at ${b} each and has ${c}, how many dollars does {p} keep?",
                ),
                ("The {o} cost {eq} dollars.", "Then {n} has {eq} dollars left."),
            ),
            Telling(
                "{n} buys {a} {o} for ${b} each. {P} pays with ${c}.",
                "How many dollars does {p} get back?",
                "In return {p} gets ${r} back.",
                (
                    "What is the change in dollars if {n} pays with ${c} for {a} {o} that cost ${b} each?",
                    "If {a} {o} cost ${b} each and {n} pays with ${c}, how many dollars does {p} get back?",
                ),
                ("The cost is {eq} dollars.", "Then {n} gets {eq} dollars back."),
            ),
        ),
    ),
    Story(
        "loss_share",
        (Step("-", 1), Step("/", 2)),
        (0, 1, 2),
        draw_subtract_divide,
        (
            Telling(
                "{n} has {a} {o}. {P} keeps {b} and shares the others equally among {c} friends.",
                "How many {o} does each friend get?",
                "Each friend gets {r} {o}.",
                (
                    "If {n} keeps {b} of {a} {o} and {c} friends share the others equally, how many does each get?",
                    "How many {o} does each of {c} friends get when {n} keeps {b} of {a} and shares the rest equally?",
                ),
                ("The friends get {eq} {o}.", "Each friend gets {eq} {o}."),
            ),
            Telling(
                "{n} had {a} {o} and lost {b}. {P} puts the others equally into {c} {g}.",
                "How many {o} are in each?",
                "There are {r} {o} in each.",
                (
                    "If {n} loses {b} of {a} {o} and fills {c} {g} equally with the others, how many does each hold?",
                    "What is the number of {o} in each of {c} {g} that {n} fills equally after losing {b} of {a} {o}?",
                ),
                ("There are {eq} {o} left.", "There are {eq} {o} in each."),
            ),
        ),
    ),
    Story(
        "share_gain",
        (Step("/", 1), Step("+", 2)),
        (0, 1, 2),
        draw_divide_add,
        (
            Telling(
                "{n} puts {a} {o} equally into {b} {g}. Then {p} adds {c} {o} to each.",
                "How many {o} are in each?",
                "Now there are {r} {o} in each.",
                (
                    "How many {o} are in each of {b} {g} if {n} puts {a} {o} equally into them and adds {c} to each?",
                    "If {n} fills {b} {g} equally with {a} {o} and then adds {c} to each, how many {o} does each hold?",
                ),
                ("First there are {eq} {o} in each.", "Then there are {eq} {o} in each."),
            ),
            Telling(
                "{n} and {q} friends share {a} {o} equally among {b} people. Then {n} finds {c} more.",
                "How many {o} does {n} have?",
                "Now {n} has {r} {o}.",
                (
                    "If {b} people share {a} {o} equally and {n}, one of them, finds {c} more, how many has {n}?",
                    "How many {o} has {n} after an equal share of {a} {o} among {b} people and finding {c} more?",
                ),
                ("Each gets {eq} {o}.", "Then {n} has {eq} {o}."),
            ),
        ),
    ),
)
