"""Makes the golden files of tests/train/test_roberta_weights.py.

    python tests/golden/make_roberta_golden.py

Needs torch, transformers and numpy; the tests need the outputs alone, which are checked
in. Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0.

Each folder is what `save_pretrained` writes for a random model, and ``logits.npz``:
``tokens`` int32 (b, t), rows padded to different lengths, and ``logits`` float32,
(b, c) of classes and (b, t, v) of words.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
LENGTHS = (32, 24, 5)
PAD = 1


def main() -> None:
    import numpy as np
    import torch
    import transformers

    models = {
        "roberta_classes": (transformers.RobertaForSequenceClassification, 3),
        "roberta_words": (transformers.RobertaForMaskedLM, 2),
    }
    for seed, (name, (kind, labels)) in enumerate(models.items()):
        torch.manual_seed(seed)
        config = transformers.RobertaConfig(**SHAPE, num_labels=labels)
        model = kind(config)
        with torch.no_grad():
            # Wide enough that every part of the model shows in the logits.
            for path, weight in model.named_parameters():
                norm = "norm" in path.lower() and path.endswith("weight")
                weight.normal_(1.0 if norm else 0.0, 0.3)
        model.save_pretrained(HERE / name)
        model = kind.from_pretrained(HERE / name).eval()
        tokens = torch.full((len(LENGTHS), max(LENGTHS)), PAD)
        for row, length in zip(tokens, LENGTHS, strict=True):
            row[:length] = torch.randint(2, SHAPE["vocab_size"], (length,))
        with torch.no_grad():
            logits = model(tokens, attention_mask=(tokens != PAD).long()).logits
        np.savez_compressed(
            HERE / name / "logits.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy(),
        )


if __name__ == "__main__":
    main()
