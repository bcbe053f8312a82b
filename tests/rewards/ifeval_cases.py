"""Responses that keep a constraint of IFEval, and such that don't, written by hand: (id, kwargs, kept, broken)."""

from __future__ import annotations

from typing import Any

KOREAN = "안녕하세요. 저는 오늘 학교에 갔습니다. 날씨가 아주 좋았고 친구들과 점심을 먹었습니다."
GERMAN = "Ich gehe heute in die Schule, weil ich dort meine Freunde treffe und etwas lernen möchte."
FRENCH = "Je vais à l'école aujourd'hui parce que je veux voir mes amis et apprendre quelque chose."
HINDI = "नमस्ते, मैं आज विद्यालय जा रहा हूँ क्योंकि मुझे अपने मित्रों से मिलना है।"
ENGLISH = "I am going to the school today because my friends are there and we want to learn something."
LETTER = "Dear neighbour,\n\nthe cat is well.\n\nYours, Anna"

Case = tuple[str, dict[str, Any], list[str], list[str]]

CASES: list[Case] = [
    (
        "keywords:existence",
        {"keywords": ["river", "stone"]},
        ["A river has a stone.", "STONE by the River", "riverbed and stones"],
        ["A river.", "A stone.", "A rock by the water.", ""],
    ),
    ("keywords:existence", {"keywords": ["c++"]}, ["I like C++.", "c++"], ["I like C.", "ccc"]),
    (
        "keywords:frequency",
        {"keyword": "fish", "frequency": 3, "relation": "at least"},
        ["fish fish fish", "Fish, FISH and fishing", "fishfishfish", "one fish two fish red fish blue fish"],
        ["fish fish", "fsh fish fish", "no animals"],
    ),
    (
        "keywords:frequency",
        {"keyword": "fish", "frequency": 2, "relation": "less than"},
        ["one fish", "none", "Fish."],
        ["fish fish", "FISHERMEN catch fish"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "dog"]},
        ["A bird.", "concatenate", "A category of dogma", "cats"],
        ["A cat.", "My DOG", "cat-like", "(dog)", "bird, dog"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["ice cream"]}, ["ice and cream", "icecream"], ["Ice cream!"]),
    (
        "keywords:letter_frequency",
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        ["zz", "Zebra puzzle", "Pizza"],
        ["zoo", "", "none"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        ["# one", "none"],
        ["## two", "# a # b"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 1, "let_relation": "less than"},
        ["no such one", "hello"],
        ["a", "bAd"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN, f"{GERMAN}\n\n{GERMAN}"], [ENGLISH, KOREAN, "12345"]),
    ("language:response_language", {"language": "ko"}, [KOREAN, f"**{KOREAN}**"], [ENGLISH, GERMAN, "", "!!!"]),
    ("language:response_language", {"language": "fr"}, [FRENCH], [GERMAN, ENGLISH]),
    ("language:response_language", {"language": "hi"}, [HINDI], [KOREAN, FRENCH]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        [
            "One. Two. Three.",
            "Stop! Why? Because.",
            'He said "No." She left. They wept.',
            "It cost 3.50 dollars. Dr. Ito paid. Fine.",
            "1. Wash it.\n2. Dry it.",  # a number with a full stop counts, as in the reference
            "First this.\nThen that.\nThen another",
        ],
        [
            "One. Two.",
            "Mr. Smith met Dr. Jones at 5 p.m. today.",
            "Really?! Yes.",
            "a line\nanother line\na third line",
            "It is 3.5.2.1 now.",
            "Wait... what is it? Oh.",
        ],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one.", "no full stop at all", "The U.S. team won.", "See www.example.com for it."],
        ["One. Two.", "What? This!", "It ends. (Really.)"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "at least"},
        ["one two three four five", "It's one of two", "a-b c-d e", "1 2 3 4 5 6"],
        ["one two three four", "", "... --- ..."],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        ["one two", "snake_case_is_one", "- * -"],
        ["one two three", "well-known thing"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 3},
        ["a\n***\nb\n***\nc", "a *** b *** c", "***a***b***c***", "a\n\nstill a\n***\nb\n***\nc"],
        ["a\n\nb\n\nc", "a *** b", "a *** b *** c *** d", "a *** *** b", "a ****** b *** c"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, ["only one", "one\n\n***"], ["a *** b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "the"},
        [LETTER, 'a\n\n"The" cat\n\nb', "a\n\nTHE, cat\n\nb", "a\nb\n\nthe\n\nc"],
        ["Dear\n\na cat\n\nYours", "Dear\n\nthe cat", "a\n\nthese\n\nb", "a\n\nthe b\n\nc\n\nd", "the\nthe\nthe"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] lives at [address]", "[a][b]", "x [one\ntwo] [three] [four]", "[x] [y] [z]"],
        ["[name]", "name, address", "[open [nested]", "[a\n]b[\nc]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\n\nP.S. I love you", "p.s. small", "text P. S. spaced"],
        ["Bye.", "PS: no dots", "P.S without the last", "ps."],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S one more", "p.p.s. small", "P. P. S. spaced"],
        ["P.S. only", "PPS", "Bye"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n- b", "Text:\n  * a\n  - b\nEnd", "* a\n\n* b"],
        ["* a", "* a\n* b\n* c", "1. a\n2. b", "**a**\n**b**", "a * b * c", "• a\n• b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is maybe.", "My answer is no. Sorry"],
        ["My answer is yes", "my answer is no.", "Yes.", "My answer is: maybe."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and **b**", "*a*\n**b**", "* item with *one* and *two*", "*a b c* x *d*"],
        ["*a*", "a b", "** **  ****", "*open\nclosed*", "* a\n* b"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 a SECTION2 b", "Intro\nSECTION 1\nSECTION 2\nSECTION 3"],
        ["SECTION 1 only", "Section 1\nSection 2", "SECTION A\nSECTION B", "1\n2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "[1, 2]", '```json\n{"a": [true, null]}\n```', "```\n{}\n```", "3", '"text"', ' {"a": 1} \n'],
        ["{'a': 1}", '{"a": 1,}', 'Here: {"a": 1}', "", '{"a": 1', '```json\n{"a": 1}\n``` Done', "[" * 100_000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<A Title>>\nText", "Text <<late>>", "<<<three>>>", "<<a>> <<b>>"],
        ["<A Title>", "<<>>", "<< >>", "<<open\nclosed>>", "A Title", ">>wrong<<"],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "one******two", "******\none\n******\ntwo\n******"],
        ["one", "one ****** one", "one ****** two ****** three", "one ***** two", "one ******", "a ****** ****** b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem about rain."},
        ["Write a poem about rain.\n\nDrip.", "  WRITE A POEM ABOUT RAIN. Drip", "Write a poem about rain."],
        ["Drip.\nWrite a poem about rain.", "Write a poem about rain\nDrip", '"Write a poem about rain." Drip'],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Is there anything else?"},
        ["Done. Is there anything else?", "done. IS THERE ANYTHING ELSE?  \n", '"Text. Is there anything else?"'],
        ["Is there anything else? No.", "Is there anything else", "Done.", ""],
    ),
    (
        "startend:quotation",
        {},
        ['"All of it."', '  "a"\n', '"a" and "b"', '""'],
        ['"', 'He said "a"', '"a" he said', "'a'", "“a”", "a"],
    ),
    (
        "change_case:english_capital",
        {},
        [ENGLISH.upper(), f"{ENGLISH.upper()} 123!", f"**{ENGLISH.upper()}**"],
        [ENGLISH, ENGLISH.upper() + "s", GERMAN.upper(), "123 !", ""],
    ),
    (
        "change_case:english_lowercase",
        {},
        [ENGLISH.lower(), f"1. {ENGLISH.lower()}", f"{ENGLISH.lower()} ***"],
        [ENGLISH, GERMAN.lower(), "", KOREAN, "42"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["HELLO WORLD", "I AM", "NASA and the U.S. agree", "This is BIG, and LOUD.", "DON'T you"],
        ["Hello World", "HELLO world", "1 2 3", "", "WELL-KNOWN only"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["ONE only", "none", "A1"],
        ["ONE TWO", "ONE,TWO", "(ONE)--TWO", "I said NO."],
    ),
    ("punctuation:no_comma", {}, ["None here.", "a; b", "", "full-width ， is another sign"], ["a, b", ",", "1,000"]),
]
