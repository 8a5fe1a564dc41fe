"""Quantized in numpy, group by group; shares nothing with the library.

bfloat16 comes from ml_dtypes, quarter octaves from a search, bytes are taken apart by
hand.
"""

import ml_dtypes
import numpy as np

from jaxcompact.codecs import Quantized

F32 = np.float32
QUARTERS = np.float32(2.0 ** (np.arange(-96, 30) / 4))


def towards(value: F32, limit: float) -> F32:
    """The nearest bfloat16 that lies on the limit's side of the value."""
    near = ml_dtypes.bfloat16(value)
    beyond = F32(near) > value if limit < 0 else F32(near) < value
    return F32(np.nextafter(near, ml_dtypes.bfloat16(limit)) if beyond else near)


def stored_scale(scale: F32, scale_bits: int) -> F32:
    if scale == 0:
        return F32(0)
    size = abs(scale)
    if scale_bits == 8:
        at = min(np.searchsorted(QUARTERS, size), len(QUARTERS) - 1)
        return np.copysign(QUARTERS[at], scale)
    return np.copysign(max(towards(size, np.inf), F32(2.0**-125)), scale)


def ratio(x: np.ndarray, scale: F32) -> np.ndarray:
    """With one reciprocal, as documented: a division would round otherwise."""
    return x * (F32(1) / scale) if scale else F32(0) * x


def mixed(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return h ^ (h >> 16)


def noise(values: np.ndarray, places: np.ndarray, seed: int) -> np.ndarray:
    golden, half = np.uint32(0x9E3779B9), -(-len(values) // 2)
    weights = golden * np.arange(len(values), dtype=np.uint32)
    weights = (weights ^ (weights >> 16)) | np.uint32(1)
    turned = values.astype(np.float32).view(np.uint16).reshape(-1, 2)[:, ::-1].copy()
    turned[:, 0] ^= np.signbit(values)
    digest = (turned.view(np.uint32)[:, 0] * weights).sum(dtype=np.uint32)
    key = mixed(digest[None] ^ mixed(np.uint32([seed & 0xFFFFFFFF]) + golden))
    hashes = mixed(places[:half] * (key | np.uint32(1)) + key)
    both = np.concatenate([hashes & 0xFFFF, hashes >> 16])[: len(values)]
    return F32((both // 2 + 0.5) / 2**15 - 0.5)


def emulated_group(codec: Quantized, values, real: int, places, seed: int):
    """Codes, scale, minimum and decoded values of one group."""
    bits = codec.bits
    top = 2 ** (bits - 1)
    low_end, high_end = codec.ends or (None, None)  # beyond: steps 16 times as large
    if low_end is not None:
        near = values / 16 + F32(low_end * 15 / 16)
        values = np.maximum(values, np.maximum(near, F32(low_end - abs(low_end) / 3)))
    if high_end is not None:
        near = values / 16 + F32(high_end * 15 / 16)
        values = np.minimum(values, np.minimum(near, F32(high_end + abs(high_end) / 3)))
    if codec.symmetric:
        absmax = np.abs(values).max()
        if bits == 1:
            sizes = np.float64(np.abs(values[:real]))
            scale = absmax if codec.stochastic else F32(sizes.mean())
        elif codec.stochastic or bits == 8:
            scale = absmax * F32(1 / (top - 1))
        else:
            extremes = values.max(), values.min()
            scale = extremes[not extremes[0] > -extremes[1]] / F32(-top)
        scale = stored_scale(scale, codec.scale_bits)
        low = None
        position, offset = ratio(values, scale), top
    else:
        low = towards(values.min(), -np.inf)
        span = F32(values.max() - low)
        scale = stored_scale(span * F32(1 / (2**bits - 1)), 16)
        position, offset = ratio(values - low, scale), 0
    if bits == 1 and codec.symmetric:
        u = noise(values, places, seed) if codec.stochastic else F32(0)
        code, offset = 2 * u < position, 0
    elif codec.stochastic:
        code = np.rint(position + noise(values, places, seed))
    else:
        code = np.rint(position)
    code = np.clip(code + offset, 0, 2**bits - 1)
    if low is not None:
        decoded = low + F32(code) * scale
    else:
        decoded = F32(2 * code - 1 if bits == 1 else code - top) * scale
    far = F32(16) * decoded
    if low_end is not None:
        decoded = np.minimum(decoded, far - F32(15 * low_end))
        decoded = np.maximum(decoded, F32(low_end - abs(low_end) * 16 / 3))
    if high_end is not None:
        decoded = np.maximum(decoded, far - F32(15 * high_end))
        decoded = np.minimum(decoded, F32(high_end + abs(high_end) * 16 / 3))
    return code.astype(int), scale, low, decoded


def bits_of(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes in a group's bytes, by the layout that kernels/bits documents."""
    if bits == 3:
        split = len(packed) * 2 // 3
        return bits_of(packed[:split], 2) + 4 * bits_of(packed[split:], 1)
    lanes = [(packed.astype(int) >> (bits * i)) % 2**bits for i in range(8 // bits)]
    return np.concatenate(lanes)
