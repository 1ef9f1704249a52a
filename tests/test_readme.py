import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_quickstart_runs(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(6)]

    exec(code, {"model": model, "optimizer": optimizer, "loader": loader})

    assert capsys.readouterr().out
