"""The suite: one program a file, each with a `PROGRAM`.

`digits`, `charlm` and `mlp` are ours; the other ten are those of Terra's evaluation (Terra, section 3.3.2).
"""

from __future__ import annotations

from bench.program import Program
from bench.programs import (
    bert_cls,
    bert_qa,
    charlm,
    dcgan,
    digits,
    dropblock,
    fasterrcnn,
    gpt2,
    mlp,
    musictransformer,
    resnet50,
    sdpoint,
    yolov3,
)

TERRA = (
    resnet50,
    dcgan,
    dropblock,
    sdpoint,
    musictransformer,
    bert_cls,
    bert_qa,
    gpt2,
    fasterrcnn,
    yolov3,
)

PROGRAMS: dict[str, Program] = {
    module.PROGRAM.name: module.PROGRAM for module in (digits, charlm, mlp, *TERRA)
}
