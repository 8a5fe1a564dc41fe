"""Makes the golden files of tests/train/test_gpt2_weights.py.

    python tests/golden/make_gpt2_golden.py

Needs torch, transformers and numpy; the tests need the outputs alone, which are checked
in. Made with Python 3.11, torch 2.15.0, transformers 5.23.0.

The folder is what `save_pretrained` writes for a random model, and ``logits.npz``:
``tokens`` int32 (b, t) and ``logits`` float32 (b, t, v).
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "gpt2"
SHAPE = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_inner": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def main() -> None:
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE))
    with torch.no_grad():
        # Wide enough that every part of the model shows in the logits.
        for path, weight in model.named_parameters():
            norm = "ln_" in path and path.endswith("weight")
            weight.normal_(1.0 if norm else 0.0, 0.3)
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink()

    model = GPT2LMHeadModel.from_pretrained(FOLDER).eval()
    tokens = torch.randint(SHAPE["vocab_size"], (2, 24))
    with torch.no_grad():
        logits = model(tokens).logits
    np.savez_compressed(
        FOLDER / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
    )


if __name__ == "__main__":
    main()
