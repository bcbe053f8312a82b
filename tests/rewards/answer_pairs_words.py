"""Answer pairs with words: units, money, text, dates and times."""

from __future__ import annotations

from answer_pairs_form import AnswerPair, Case, written

UNITS: list[Case] = [
    (
        "5 km",
        ("5", r"5 \text{ km}", r"5\,\text{km}", "5 kilometers", r"5~\mathrm{km}"),
        ("5 m", "5 miles", "50 km", "5000 km", r"5 \text{ m}"),
    ),
    (
        r"12 \text{ cm}",
        ("12", "12 cm", "12cm", r"12\ \text{centimeters}"),
        (r"12 \text{ cm}^2", r"12 \text{ mm}", "1.2 cm", r"12 \text{ inches}"),
    ),
    (
        "50",
        (r"50 \text{ m}^2", "50 m²", r"50 \text{ square meters}", r"50\text{ units}"),
        (r"50 \text{ million}", "500 m²", r"50^2"),
    ),
    ("3 hours", ("3", r"3 \text{ hours}", "3 hrs"), ("3 minutes", "3 days", "30 hours")),
    ("60 mph", ("60", r"60 \text{ miles per hour}", r"60 \text{ mph}"), (r"60 \text{ km/h}", "600 mph")),
    (r"9.8 \text{ m/s}^2", ("9.8", "9.8 m/s^2", r"9.8\ \mathrm{m/s^2}"), (r"9.8 \text{ m/s}", r"9.8 \text{ ft/s}^2")),
    (
        r"20^\circ \text{C}",
        ("20", r"20^{\circ}\text{C}", r"20 ^\circ \mathrm{C}"),
        (r"20^\circ \text{F}", r"-20^\circ \text{C}"),
    ),
    ("5 degrees C", (r"5 \text{ degrees C}",), ("5 degrees F",)),
    ("7 apples", ("7", r"7 \text{ apples}"), ("7 oranges", "8 apples")),
    ("24", (r"24 \text{ cm}", "24 students"), ("24x",)),
    ("6", ("6 cm",), (r"6 \text{ cm} \times 4 \text{ cm}", r"6 \text{ cm}, 4 \text{ cm}")),
    (r"3 \text{ kg}", ("3 kilograms",), ("3 g", r"3 \text{ pounds}")),
    (r"5 \text{ mW}", ("5", "5 mW"), (r"5 \text{ MW}", "5 W")),
    ("4 mm", ("4", "4 millimeters"), ("4 Mm",)),
]

MONEY: list[Case] = [
    (r"\$5", ("5", "5 dollars", "$5$", r"\$5.00", r"\text{\$5}"), (r"\text{€}5", r"\$50", "5 cents", r"-\$5")),
    (
        r"\$1,250",
        ("1250", r"\$1250.00", r"1{,}250 \text{ dollars}", r"\$1{,}250", r"\$ 1,250"),
        (r"\$1.25", r"\$1,205", r"\$12,50", r"\$1,250,000"),
    ),
    ("12.50", (r"\$12.50", "12.5 dollars", r"\$12.5"), (r"\$1250", r"\$12.05", r"\$125")),
    ("50 cents", ("50", r"50 \text{ cents}", "50¢"), ("50 dollars", r"\$50", "5 cents")),
    ("€20", ("20", "20 euros", "20 €", r"20 \text{ euros}"), (r"\$20", "£20", "€200")),
    (
        r"\$1.5 \text{ million}",
        (r"\$1,500,000", "1500000", r"1.5 \text{ million dollars}"),
        (r"\$1.5", r"\$1.5 \text{ billion}", "1.5"),
    ),
    (r"-\$30", ("-30", r"\$-30"), (r"\$30", "30")),
]

TEXT: list[Case] = [
    ("Yes", ("yes", r"\text{Yes}", "Yes.", r"\textbf{yes}"), ("No", r"\text{No}", "Yes or No", "sYe")),
    ("No", (r"\text{No}", "no"), ("Yes", "None", "On")),
    (r"\text{January 5}", ("January 5", r"\text{January 5}."), ("January 6", "June 5", "January", "5")),
    ("Evelyn", (r"\text{Evelyn}", r"\mathrm{Evelyn}"), ("Evelina", r"\text{Debra}")),
    (r"\text{(C)}", ("C", "(C)", r"\text{C}", r"\textbf{(C)}"), ("D", r"\text{(B)}", r"\text{(CD)}")),
    ("increasing", (r"\text{increasing}", "Increasing"), ("decreasing", "not increasing")),
    ("converges", (r"\text{converges}", "Converges"), ("diverges", r"\text{diverges}")),
    (r"\text{no solution}", ("no solution", "No solution", r"\text{No solution.}"), ("solution", "one solution", "0")),
    ("5 north", (r"5 \text{ north}",), ("5 south", r"5 \text{ east}")),
    (r"\text{right triangle}", ("right triangle",), ("isosceles triangle", "triangle")),
    ("True", ("true", r"\text{True}"), ("False", r"\text{false}")),
    (r"\text{Sunday}", ("Sunday", "sunday"), ("Monday", r"\text{Saturday}")),
]

TIMES: list[Case] = [
    ("12:30", (r"\text{12:30}", "$12:30$", r"12\!:\!30", "12{:}30"), ("2:05", "12:03", "1230", r"\frac{12}{30}", "12")),
    ("5 am", ("5 a.m.", r"5 \text{ am}", "5 AM"), ("5 pm", r"5 \text{ p.m.}", "6 am")),
    (
        r"3:45 \text{ PM}",
        ("3:45 pm", "3:45 p.m.", r"\text{3:45 PM}"),
        ("3:45 am", r"3:54 \text{ PM}", r"4:45 \text{ PM}"),
    ),
    ("6:30", (r"\text{6:30}",), ("0.2", "6:03", "5")),
    ("10:15", (r"10\!:\!15",), ("2:03", "10:45", r"\frac{2}{3}")),
    ("2024-01-05", (r"\text{2024-01-05}",), ("2024-05-01", "2018", "2023-01-05")),
    (r"\text{January 5, 2024}", ("January 5, 2024", "January 5 2024"), ("January 5, 2023", "2024", "January 2024")),
    (r"\text{March 14}", ("March 14", r"\text{March } 14"), ("March 15", "May 14", "14")),
    ("1999", (r"\text{1999}",), ("1999 - 01", "99")),
]

KINDS = {"units": UNITS, "money": MONEY, "text": TEXT, "dates and times": TIMES}


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    return [pair for kind, cases in KINDS.items() for pair in written(kind, cases)]
