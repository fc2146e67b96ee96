"""An example of each command, which its `--help` shows below the options."""

from collections.abc import Mapping

import typer

EXAMPLES: Mapping[str, str] = {
    "train": "midflight train configs/demo.toml --set rollout.max_staleness=2",
    "rollouts": "midflight rollouts configs/demo.toml --folder runs/mine",
    "serve": "midflight serve --model runs/demo/model --port 8000",
    "engine": "midflight engine --model runs/demo/model --port 8001",
    "evaluate": "midflight evaluate runs/demo/model --config configs/demo.toml",
    "rollback": "midflight rollback runs/demo --to 20",
    "new-model": "midflight new-model models/tiny --set model.max_context=512",
    "check-model": "midflight check-model models/smollm2-135m",
    "init": "midflight init mine --model models/smollm2-135m",
    "fetch-model": "midflight fetch-model smollm2-135m models/smollm2-135m",
    "join": "midflight join --url http://10.0.0.1:8000 --token TOKEN --max-running 32",
    "runs": "midflight runs runs",
    "compare": "midflight compare runs/demo runs/mine",
    "view": "midflight view runs --port 8080",
    "samples": "midflight samples runs/demo --worst --number 5",
    "ledger": "midflight ledger runs/demo",
    "replay": "midflight replay runs/demo --step 340 --explain 0:12",
    "export": "midflight export runs/demo --format dpo --out pairs.jsonl",
    "doctor": "midflight doctor configs/demo.toml",
    "trace": "midflight trace runs/demo --out trace.json",
    "report": "midflight report runs/demo --out report.html",
    "completion": "midflight completion zsh",
}


def add_examples(app: typer.Typer) -> None:
    """Puts its example below the help of each command."""
    for command in app.registered_commands:
        name = command.name
        if name is None and command.callback is not None:
            name = command.callback.__name__
        if name is not None and name in EXAMPLES:
            command.epilog = f"Example: {EXAMPLES[name]}"
