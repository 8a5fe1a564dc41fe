"""Makes the golden files of tests/train/test_weights.py.

    python tests/golden/make_llama_golden.py

Needs torch, transformers and numpy; the tests need the outputs alone, which are checked
in. Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0.

Each folder is what `save_pretrained` writes for a random model, and ``logits.npz``:
``tokens`` int32 (b, t) and ``logits`` float32 (b, t, v) of float32 weights.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {  # folder -> what differs from SHAPE, dtype of the file
    "llama_gqa": (
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        "float32",
    ),
    "llama_tied": ({"tie_word_embeddings": True}, "bfloat16"),
}


def main() -> None:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for seed, (name, (shape, dtype)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **shape))
        with torch.no_grad():
            # Wide enough that every part of the model shows in the logits.
            for path, weight in model.named_parameters():
                norm = path.endswith("norm.weight")
                weight.normal_(1.0 if norm else 0.0, 0.3)
        model.to(getattr(torch, dtype)).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()

        model = LlamaForCausalLM.from_pretrained(HERE / name, dtype=torch.float32)
        tokens = torch.randint(SHAPE["vocab_size"], (2, 24))
        with torch.no_grad():
            logits = model.eval()(tokens).logits
        np.savez_compressed(
            HERE / name / "logits.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy(),
        )


if __name__ == "__main__":
    main()
