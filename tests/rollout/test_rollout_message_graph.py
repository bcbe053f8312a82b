"""What a client sends back finds the responses that it continues, and never changes their tokens."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, QWEN25, bpe_tokenizer, ids_of

from roll.envs.base import Message
from roll.rollout.chat import ChatTemplate
from roll.rollout.message_graph import MessageGraph

USER, AGAIN = Message("user", "Which way?"), Message("user", "And then?")
SYSTEM = Message("system", "Play.")


class Chat:
    """A client, and a policy that says what it is told to."""

    def __init__(self, template=CHATML, history="carried"):
        self.tokenizer = bpe_tokenizer(template)
        self.graph = MessageGraph(ChatTemplate(self.tokenizer), history)

    def say(self, messages, text, *, tools=(), message=None, closes=True):
        placement = self.graph.place(messages, tools)
        ids = ids_of(self.tokenizer, text + ("<|im_end|>" if closes else ""))
        node = self.graph.grow(placement, ids, message or Message("assistant", text))
        return node, placement

    def text(self, placement):
        return self.tokenizer.decode(placement.context_ids)


@pytest.mark.parametrize("history", ["carried", "rendered"])
@pytest.mark.parametrize("template", [CHATML, QWEN25])
def test_a_response_that_comes_back_as_it_was_is_continued(template, history):
    chat = Chat(template, history)
    first, root = chat.say([SYSTEM, USER], "Up")
    second, after = chat.say([SYSTEM, USER, Message("assistant", "Up"), AGAIN], "Down", closes=False)
    _, last = chat.say([SYSTEM, USER, Message("assistant", "Up"), AGAIN, Message("assistant", "Down"), USER], "x")
    assert (root.parent, after.parent, last.parent) == (None, first, second)
    whole = "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\nUp"
    whole += "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\nDown"
    whole += "<|im_end|>\n<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text(last) == last.text == whole
    assert not root.mismatches and not after.mismatches and not last.mismatches
