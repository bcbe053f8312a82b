"""`choice`: which letter a response settles on."""

from __future__ import annotations

import pytest

from roll.rewards.choice import choice
from roll.rewards.choice_statements import stated_letter
from roll.types.trajectory import Task

STATED = {
    "B": "B", "(B)": "B", "B.": "B", "**B**": "B", "B) Paris": "B", "B. Paris": "B", r"\boxed{B}": "B",
    r"\boxed{\text{B}}": "B", r"$\boxed{(B)}$ I think": "B", r"\boxed{B. Paris}": "B", "The answer is B": "B",
    "The answer is (B).": "B", "The correct answer is: **B**": "B", "Answer: B": "B", "**Answer:** B": "B",
    "answer is option B, Paris": "B", "I choose B.": "B", "So it must be (C), not (B).": "C",
    "It is (A). No, wait, it is (C).": "C", "The answer is A. Sorry, the answer is D.": "D",
    "It's (C), not (B)": "C", "(A) is wrong, (B) is incorrect, so (C)": "C", "not (B)": None,
    "The answer is not (B)": None, "The answer isn't B, it's C": "C", "I rule out (A) and choose (D)": "D",
    "I'd go with B rather than (A)": "B", "The answer is B because (A) isn't a city": "B",
    "A dog is a friend": None, "I am here": None, "": None, "The answer is Because": None, "answer is ABC": None,
    r"(A) or (B)? \boxed{C}": "C", r"\boxed{B} no, \boxed{A}": "A", r"The answer is B \boxed{": None,
    r"\boxed{42} the answer is B": None, "b": "B", "Option A has merit.\n\nD": "D", 
    "C is wrong. The answer is A.": "A",
    "Answer: (B) is not right. Answer: (A)": "A", "We pick $\\mathrm{C}$.": "C",
}  # fmt: skip

ENDINGS = {
    "\\boxed{b}": "B", "\\boxed{\\text{b}}": "B", "\\boxed{Option B}": "B", "\\boxed{B) 5}": "B",
    "\\boxed{\\textbf{(C)}}": "C", "\\boxed{A, C}": None, "\\boxed{a dog}": None, "\\boxed{A and B}": None,
    "<answer>B</answer>": "B", "<answer>b</answer>": "B", "<answer>(B)</answer>": "B",
    "<answer> B. Rome </answer>": "B", "<answer>The answer is C.</answer>": "C", "<answer>Option B</answer>": "B",
    "<answer>Rome</answer>": None, "A is right. <answer>B</answer>": "B",
    "<answer>A</answer> no <answer>C</answer>": "C", "<answer>**B**</answer>": "B", "<answer>\\boxed{D}</answer>": "D",
    "Option B is correct.": "B", "option C is correct": "C", "B is correct, A is wrong.": "B",
    "A is wrong, B is correct.": "B", "C is the best answer": "C", "I settled on C": "C",
    "The answer is A? No, C.": "C", "The answer is A? No, it's C.": "C", "(B)": "B", "**B**": "B", "B) text": "B",
    "Answer: B": "B", "answer: b": "B", "The answer is b.": "B", "option b is correct": "B",
    "The correct option is (C).": "C", "Correct option: C": "C", "eliminate A and B, leaving C": "C",
    "We can eliminate A and B, leaving only C.": "C", "not A": None, "A is incorrect": None,
    "A, B and D are wrong.": None, "Neither A nor B is correct": None, "I'd say B": "B", "My choice is D.": "D",
    "Final answer: **C**": "C", "So the answer would be C.": "C", "I would go with option D.": "D",
    "I'm going with B": "B", "The best choice is B, since A is too vague.": "B", "Therefore, B.": "B",
    "Therefore, (B) is the answer.": "B", "Thus C.": "C", "So, it must be A.": "A", "A is the answer.": "A",
    "The answer is A.": "A", "A": "A", "A.": "A", "A is correct because it rains.": "A", "The answer is: A": "A",
    "ANSWER: C": "C", "Answer - C": "C", "Answer is C": "C", "The answer: (C)": "C", "Choice C is right": "C",
    "Letter C": "C", "C seems right": "C", "C is the most likely.": "C", "C fits best": "C", "Only C works.": "C",
    "That leaves C.": "C", "I choose C, not D": "C", "C, not D, is correct.": "C", "It's not A but C": "C",
    "It isn't A, it's C.": "C", "The answer isn't B.": None, "I don't think it's B.": None,
    "I wouldn't choose B": None, "B can't be right.": None, "B cannot be the answer": None, "A or B": None,
    "The answer is A or B": None, "The answer is either A or B.": None, "A and C are correct": None,
    "Both A and B are right.": None, "The answer is A. Wait, actually it's B.": "B",
    "The answer is B. No, B is wrong.": None, "I think A... no, B.": "B",
    "First I thought A, but the answer is D.": "D", "Is it A? Is it B?": None, "Could it be C?": None,
    "If the answer were B, it would rain.": None, "Some people say A, but the correct answer is B.": "B",
    "A) Paris\nB) Rome\nC) Oslo\nD) Bern": None, "A. Paris\nB. Rome\nC. Oslo\nD. Bern\n\nThe answer is B.": "B",
    "A. Paris\nB. Rome\n\nC": "C", "Vitamin C is the best for you.": None, "Hepatitis B is correct to fear": None,
    "Plan B is the best answer to failure": None, "A dog is the best answer to boredom": None, "I think so.": None,
    "I am right": None, "It depends.": None, "None of them.": None, "I can't answer.": None,
    "A better answer would be no answer.": None, "(A) is wrong, (B) is incorrect, (D) is false": None,
    "The correct answer is B: Rome.": "B", 'The correct answer is "B".': "B", "Correct answer: 'B'": "B",
    "the answer is [B]": "B", "The answer is $B$.": "B", "The answer is $\\boxed{B}$.": "B",
    "The answer is $\\text{(B)}$": "B", "**Answer: B**": "B", "### Answer\nB": "B", "### Answer\n\n**(B)** Rome": "B",
    "Answer:\nB": "B", "Answer:\n\nB. Rome": "B", "B is my final answer": "B", "My final answer is B": "B",
    "B it is.": "B", "I pick B over A.": "B", "I prefer B to A": "B", "B rather than A": "B",
    "A is too vague, so I would choose B.": "B", "We rule out A, C and D. B remains.": "B",
    "The remaining option is B.": "B", "The correct answer among the options is B.": "B",
    "Among these, B is correct.": "B", "The answer to this question is B.": "B", "B, because A is wrong.": "B",
    "B because it is.": "B", "Not only A but B is correct": None, "A is not correct, nor is B.": None,
    "None of A, B or C is correct.": None, "The answer is not A, it is not B, it is D.": "D",
    "D is correct. A, B and C are not.": "D", "A isn't wrong": None,
    "Answer: A. Explanation: B and C are wrong, D is irrelevant.": "A",
    "The answer is B.\n\nA is incorrect because it is small. C is incorrect. D is not relevant.": "B",
    "Answer: B) Rome": "B", "（B）": "B", "The answer is Ｂ": "B", "The final answer is B!": "B", "Answer B": "B",
    "the answer's C": "C", "It has to be B.": "B", "All signs point to B.": "B", "So we have B": None,
    "Definitely C": "C", "Probably C.": "C", "The options are A, B, C and D.": None,
    "Let me analyze option A first.": None,
    "Option A: Paris is in France. Option B: Rome is in Italy. The correct one is B.": "B",
    "Option A: Paris\nOption B: Rome": None,
    "Let's look at A. It says Paris. This is wrong. Let's look at B. It says Rome. This is right. So B.": "B",

    "Looking at the choices, A) is about cats, B) is about dogs. So the answer is B).": "B",
    "The correct choice here would be **D) 42**.": "D",
    "I believe the correct answer is C) Oslo, because it's north.": "C", "Answer:B": "B", "answer=B": "B",
    "Answer is:B": "B", "The right answer is thus C": "C", "Based on this, the answer is most likely D.": "D",
    "It must be either A or C, and since A is impossible, it is C.": "C",
    "I was going to say A, but B is more accurate.": "B", "My answer: A, although B is tempting.": "A",
    "My answer is A, not B.": "A", "A and B are both wrong, so C must be right.": "C",
    "Out of A and B, B is better.": "B", "Only (D) satisfies both.": "D", "(A) fails, (B) fails, (C) works.": "C",
    "A is false. B is false. C is true. D is false.": "C", "A: no\nB: yes\nC: no": None,
    "I don't know, maybe B?": None, "I'm not sure, but I think B.": "B", "I am not sure. B.": "B",
    "None of the above.": None, "The answer can't be determined.": None,
    "There isn't enough information to choose between A and B.": None, "Choose A, B, C or D.": None,
    "Please choose A or B.": None, "The answer is not A. It's B.": "B", "Since A isn't an option, I choose D.": "D",
    "I chose B because A, C and D are wrong.": "B", "Correct: B": "B", "B ✓": None, "✅ B": None,
    "The answer is option (b)": "B", "(b)": "B", "(b) Rome": "B", "b) Rome": "B", "b.": "B", "[B]": "B",
    "The answer is\n\nB": "B", "The answer is:\n(B) Rome": "B", "Final Answer: \\(B\\)": "B", "Answer: \\text{B}": "B",
    "Answer: __B__": "B", "The answer is <b>B</b>.": "B", "Option B": "B", "Option (B)": "B", "Choice: B": "B",
    "Response: B": "B", "Selected option: B": "B", "The answer is B.\nThe answer is C.": "C",
    "So the correct answer is option B) 12 cm.": "B", "The grade is A.": None, "From A to B.": None,
    "Let A be a set.": None, "A = 5, B = 6": None, "If A then B.": None, "Point B is 3 m away.": None,
    "The answer is 42.": None, "The answer is Answer.": None, "answer is ABCD": None,
    "I initially considered B but the correct answer is A.": "A", "You might think it's A; it's actually D.": "D",
    "The answer is C (not B).": "C", "B (because of rain)": "B", "It cannot be A, B, or D. It is C.": "C",
    "A. This is the correct answer.": "A", "The answer is A, B is wrong.": "A", "The answer is A and B is wrong.": "A",
    "Everything considered, I'd pick C!": "C", "The answer: B, C or D": None, "The answer is A, no wait, B": "B",
    "Answer: A or B": None, "It's B or C, I can't tell": None, "I choose A. On second thought, B.": "B",
    "A? B? C?": None, "The answer is (A) or (B), probably (B).": "B", "A: wrong. B: right.": "B",
    "B is wrong; the answer is C.": "C", "Answer: C (since A and B are wrong)": "C", "The answer is: C, D": None,
    "C and D": None, "I'll answer with A": "A", "I got B.": "B", "Looks like B": "B",
    "must choose between A and B; A it is": "A", "Answer: [A]": "A", "A|B": None, "My answer: B/C": None,
    "Option A is the correct answer, not option B.": "A", "Options A and B are wrong; option C is right.": "C",
    "C is the answer I chose": "C", "I believe that C is true": "C", "B!": "B", "B?": None, "Selected: C": "C",
    "Solution: C": "C", "C – Oslo": "C", "C - Oslo": "C", "C: Oslo": "C", "**C. Oslo**": "C",
    "**Answer:** C. Oslo": "C", "The best answer is **C. Oslo**": "C", "(C) Oslo": "C", "[C] Oslo": "C",
    "Answer is (C) Oslo": "C", "Therefore the correct option is D": "D", "Hence (D).": "D", "Ans: B": "B",
    "ans. B": "B", "The ans is C": "C", "Correct Answer: Option C": "C", "answer is choice C": "C",
    "choice (C) is correct": "C", "The answer is option: C": "C",
    "The answer is C because B doesn't fit, and A is too long.": "C", "A) is correct": "A", '"B"': "B", "'B'": "B",
    "The answer's clearly B.": "B", "It's clear that the answer is B.": "B", "We get C.": "C", "which is C": "C",
    "which corresponds to option C": "C", "This matches option C.": "C", "This corresponds to choice (C).": "C",
    "This is option C": "C", "So option C.": "C", "Option C it is.": "C", "Only option C remains": "C",
    "I eliminated A, B, and D. So C.": "C", "B alone is correct": "B", "The answer must therefore be (D)": "D",
    "I am going for B": "B", "B, final answer.": "B", "Final: B": "B", "Final answer B": "B",
    "The answer is B, I think.": "B", "I think it is B": "B", "I think B": "B", "Maybe B": "B", "Perhaps B.": "B",
    "Likely B": "B", "My guess is B": "B", "My guess: B": "B", "A is correct? No. B is.": "B",
    "The correct answer is not listed.": None, "The correct answer is neither A nor B.": None, "Answer: None": None,
    "Answer: N/A": None, "The answer is C or maybe D": None,
    "D is incorrect, C is incorrect, B is incorrect; therefore A is correct.": "A", "Statement B is true": "B",
    "B is the right one": "B", "Answer choices: A, B, C, D. I pick C": "C", "To answer: a": "A",
    "An answer: a b c": None, "Answer:\n- A\n- B": None,
    "A doesn't fit; B doesn't fit; D doesn't fit. That leaves us with C.": "C", "C is what I'd choose.": "C",
    "The winner is C": "C", "Let's evaluate: A) 3 - no. B) 4 - yes. C) 5 - no.\nSo the answer is B) 4.": "B",
    "It's definitely not A. B seems plausible but C is better.": "C", "Although B is tempting, C is correct.": "C",
    "The answer is B. Just kidding, it's C.": "C", "The sum of A and B is 7, which is C.": "C",
    "Triangle ABC has angle A. Answer: D": "D", "The statement C is false": None, "The answer is yes.": None,
    "The answer is B. Wait, B is not correct.": None, "The answer is B. Actually, B is not the answer.": None,
    "B is correct. Sorry, B was not the right choice.": None, "The answer is B. A is not correct.": "B",
    "A is the correct answer? No.": None, "The answer is definitely not D.": None, "The answer is (E).": None,
    "\\boxed{A. B. C. D.}": None, "(A)(B)(C)(D)": None, "<answer>A B C D</answer>": None,
    "\\boxed{A. B is larger}": "A",
}  # fmt: skip
"""How people and models end such a response, from A to D; None: it settles on no letter, or on several."""


@pytest.mark.parametrize(("text", "letter"), [*STATED.items(), *ENDINGS.items()])
def test_the_letter_that_a_response_settles_on(text: str, letter: str | None):
    assert stated_letter(text, "ABCD") == letter


def task(truth: object) -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="d")


@pytest.mark.parametrize("truth", ["B", " (B) ", "B.", "B. Paris", "(B) Paris", "[B]", 1, "b", "(b)"])
def test_a_truth_is_a_letter_its_text_or_its_number(truth: object):
    assert choice("The answer is B", task(truth)).parts == {"correct": 1.0, "answered": 1.0}
    assert choice("The answer is C", task(truth)).parts == {"correct": 0.0, "answered": 1.0}
    assert choice("", task(truth)).parts == {"correct": 0.0, "answered": 0.0}


@pytest.mark.parametrize("truth", ["Paris", "Z", 17, True, 1.5, "", "Because"])
def test_a_truth_that_is_no_choice_is_an_error(truth: object):
    with pytest.raises(ValueError, match=r"task 't:1'.*is no choice"):
        choice("B", task(truth))


def test_a_truth_in_another_form_is_refused_with_its_letter():
    # Texts in place of letters, as GPQA and SciQ have them, and ARC's labels 1 to 4.
    row = {"ground_truth": "Rome", "choices": {"text": ["Paris", "Rome"], "label": ["A", "B"]}}
    with pytest.raises(ValueError, match="its letter in the column 'choices' is 'B': write that"):
        choice("B", Task(id="t:1", source="t", payload=row, seed=0, tag="t", domain="d"))
    with pytest.raises(ValueError, match="may count from 0 or from 1: write the letter"):
        choice("B", task("2"))


def test_letters_other_than_the_first_ones_are_read_alike():
    assert stated_letter("The answer is I, because it rains.", "ABCDEFGHIJ") == "I"
    assert stated_letter("(J) is correct", "ABCDEFGHIJ") == "J"
    for text in ("I think it rains.", "I am sure. I was there.", "The answer is I think obvious."):
        assert stated_letter(text, "ABCDEFGHIJ") is None


def test_thinking_states_nothing_and_a_box_can_be_required():
    assert choice("<think>The answer is A</think> The answer is B", task("B")).value == 1.0
    assert choice("<think>The answer is B", task("B")).value == 0.0
    assert choice("The answer is B", task("B"), require_boxed=True).value == 0.0


def test_a_hostile_response_is_quick():
    for text in (
        "answer is " * 100_000,
        "(B) " * 100_000,
        "*" * 100_000,
        "not " * 100_000 + "(B)",
        "\\boxed{" * 50_000,
        "B is " * 100_000,
        "A and " * 100_000,
        "$A$" * 100_000,
        "if not so " * 100_000 + "B",
        "<answer>" * 100_000,
    ):
        choice(text, task("B"))
