"""BERT classifies lines of the standard library: with which keyword did a line begin?

Its trait: a metric of scikit-learn in the step, which looks at labels and predictions as NumPy arrays.

The model is `transformers`' with random weights.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019).
Shapes: B batch, T time.
"""

from __future__ import annotations

import torch
from sklearn.metrics import accuracy_score

from bench.bert import Config
from bench.data.words import MODULES, SEPARATOR, START, Vocabulary, pad, read_texts
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches

KEYWORDS = ("class", "def", "for", "if", "raise", "return", "while", "with")


CONFIGS: dict[Preset, Config] = {
    "small": Config(layers=3, width=96, heads=4, vocabulary=1000, context=32, batch_size=16),
    "full": Config(layers=12, width=768, heads=12, vocabulary=8000, context=128, batch_size=32),
    "tiny": Config(layers=1, width=32, heads=2, vocabulary=300, context=24, batch_size=8),
}


class BertCLSTraining(LoggedTraining):
    """AdamW with a linear warm-up; keeps the accuracy of every batch."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from transformers import BertForSequenceClassification

        lines, labels = _read_lines()
        vocabulary = Vocabulary.of(lines, config.vocabulary)
        encoded = [[START, *vocabulary.encode(line)[: config.context - 2], SEPARATOR] for line in lines]
        tokens = torch.tensor(pad(encoded, config.context), device=device)
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
        test, train = order[:200], order[200:]
        self.tokens, self.labels = tokens[train], torch.tensor(labels, device=device)[train]
        self.test_tokens, self.test_labels = tokens[test], torch.tensor(labels, device=device)[test]
        self.rows = shuffled_batches(len(train), config.batch_size)
        model = BertForSequenceClassification(config.of_transformers(num_labels=len(KEYWORDS))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        self.accuracies: list[float] = []
        super().__init__(model, optimizer, steps_per_epoch=100)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        rows = next(self.rows)
        tokens_BT, labels_B = self.tokens[rows], self.labels[rows]
        [optimizer] = self.optimizers
        with tape():
            optimizer.zero_grad()
            output = self.model(input_ids=tokens_BT, attention_mask=(tokens_BT != 0).long(), labels=labels_B)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.schedule.step()
            predicted_B = output.logits.detach().argmax(-1)
            self.accuracies.append(accuracy_score(labels_B.cpu().numpy(), predicted_B.cpu().numpy()))
            self.log(output.loss)
        loss: torch.Tensor = output.loss
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the share of test lines that are classified correctly."""
        self.model.eval()
        mask = (self.test_tokens != 0).long()
        predicted = self.model(input_ids=self.test_tokens, attention_mask=mask).logits.argmax(-1)
        self.model.train()
        return float(accuracy_score(self.test_labels.cpu().numpy(), predicted.cpu().numpy()))


def _read_lines() -> tuple[list[list[str]], list[int]]:
    """Return the words of each line that begins with a keyword, without it, and the number of the keyword."""
    lines, labels = [], []
    for module in MODULES:
        for keyword, *words in read_texts(module, lines=1):
            if keyword in KEYWORDS:
                lines.append(words)
                labels.append(KEYWORDS.index(keyword))
    return lines, labels


def make(seed: int, preset: Preset) -> BertCLSTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return BertCLSTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="bert_cls",
    description="BERT classifies lines of Python's own sources, with a metric of scikit-learn in each step",
    metric="test accuracy",
    make=make,
    requires=("transformers",),
)
