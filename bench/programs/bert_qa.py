"""BERT answers questions about the standard library: which parameters does a function of this name take?

The question is a function's name, the context a stretch of source in which it is defined, and the answer the
place of its parameter list there. The model is `transformers`' with random weights.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019), section 4.2.
Shapes: B batch, T time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from bench.bert import Config
from bench.data.words import MODULES, SEPARATOR, START, Vocabulary, pad, read_module, split_words
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches

CONFIGS: dict[Preset, Config] = {
    "small": Config(layers=3, width=96, heads=4, vocabulary=1000, context=48, batch_size=8),
    "full": Config(layers=12, width=768, heads=12, vocabulary=8000, context=384, batch_size=12),
    "tiny": Config(layers=1, width=32, heads=2, vocabulary=300, context=24, batch_size=8),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A name and a context, as words, and where the answer stands in the context."""

    name: str
    context: list[str]
    start: int
    end: int


class BertQATraining(LoggedTraining):
    """AdamW over questions of equal length."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from transformers import BertForQuestionAnswering

        questions = _read_questions(config.context)
        vocabulary = Vocabulary.of([question.context for question in questions], config.vocabulary)
        rows = [
            [START, *vocabulary.encode([question.name]), SEPARATOR, *vocabulary.encode(question.context)]
            for question in questions
        ]
        self.tokens = torch.tensor(pad(rows, config.context), device=device)
        self.spans = torch.tensor([[3 + q.start, 3 + q.end] for q in questions], device=device)
        self.tests = len(questions) // 10
        self.rows = shuffled_batches(len(questions) - self.tests, config.batch_size)
        # The question and its frame are three words long.
        self.segments = (torch.arange(config.context, device=device) >= 3).long()
        model = BertForQuestionAnswering(config.of_transformers()).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        super().__init__(model, optimizer, steps_per_epoch=100)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        rows = next(self.rows)
        tokens_BT, spans = self.tokens[rows], self.spans[rows]
        [optimizer] = self.optimizers
        with tape():
            output = self.model(
                input_ids=tokens_BT,
                attention_mask=(tokens_BT != 0).long(),
                token_type_ids=self.segments.expand_as(tokens_BT),
                start_positions=spans[:, 0],
                end_positions=spans[:, 1],
            )
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.log(output.loss)
        loss: torch.Tensor = output.loss
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the share of test questions whose answer is found exactly."""
        tokens, spans = self.tokens[-self.tests :], self.spans[-self.tests :]
        self.model.eval()
        output = self.model(
            input_ids=tokens,
            attention_mask=(tokens != 0).long(),
            token_type_ids=self.segments.expand_as(tokens),
        )
        self.model.train()
        found = torch.stack([output.start_logits.argmax(-1), output.end_logits.argmax(-1)], dim=1)
        return (found == spans).all(1).float().mean().item()


def _read_questions(length: int) -> list[Question]:
    """Return one question a function whose parameter list fits into the context.

    The contexts begin up to a third of their length before the function; the question takes three words.
    """
    places = random.Random(0)
    questions = []
    for module in MODULES:
        words = split_words(read_module(module))
        for place in range(len(words) - length):
            if (
                words[place] != "def"
                or words[place + 2] != "("
                or ")" not in words[place : place + length // 2]
            ):
                continue
            first = max(0, place - places.randrange(length // 3))
            context = words[first : first + length - 3]
            end = context.index(")", place - first)
            questions.append(Question(words[place + 1], context, place - first + 2, end))
    places.shuffle(questions)
    return questions


def make(seed: int, preset: Preset) -> BertQATraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return BertQATraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="bert_qa",
    description="BERT finds the parameters of a named function in Python's own sources",
    metric="exact answers",
    make=make,
    requires=("transformers",),
)
