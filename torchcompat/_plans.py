"""What an operator does to its arguments, read once from its schema.

A plan says which arguments are written, which outputs are views of which argument, which are new
memory, whether the operator draws random numbers, and what the recorder may assume about it.
Schemas are slow to walk (about 1.5 us a look), so a plan is made once per overload and kept.

The tables below are what schemas do not say, as far as torch's own operators are concerned.
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import autograd_hooks
from torchcompat._tape import flat

aten = torch.ops.aten

# In place, without reading what was there, and writing all of it.
_OVERWRITES = """
    zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_
    geometric_
"""
# New memory of a given shape, filled by one in-place operator: what the values depend on is then
# the fill alone, never the tensor whose shape was asked for.
_LIKES = {
    "empty_like": None,
    "new_empty": None,
    "new_empty_strided": None,
    "zeros_like": (aten.zero_.default, ()),
    "new_zeros": (aten.zero_.default, ()),
    "ones_like": (aten.fill_.Scalar, (1,)),
    "new_ones": (aten.fill_.Scalar, (1,)),
    "full_like": (aten.fill_.Scalar, ("fill_value",)),
    "new_full": (aten.fill_.Scalar, ("fill_value",)),
    "rand_like": (aten.uniform_.default, (0.0, 1.0)),
    "randn_like": (aten.normal_.default, (0.0, 1.0)),
    "randint_like": (aten.random_.__getattr__("from"), ("low", "high")),
    "rand": (aten.uniform_.default, (0.0, 1.0)),
    "randn": (aten.normal_.default, (0.0, 1.0)),
    "randint": (aten.random_.__getattr__("from"), ("low", "high")),
    "normal": (aten.normal_.default, ("mean", "std")),
    "empty": None,
    "empty_strided": None,
    "zeros": (aten.zero_.default, ()),
    "ones": (aten.fill_.Scalar, (1,)),
    "full": (aten.fill_.Scalar, ("fill_value",)),
}
_SIZED = {"empty", "zeros", "ones", "full", "rand", "randn", "randint", "normal"}
_SIZED |= {"new_empty", "new_zeros", "new_ones", "new_full"}
# The first argument's sizes and layout, though elements come from other places too.
_KEEPS_SIZES = {"tril", "triu", "cumsum", "cumprod", "flip", "roll", "_softmax", "_log_softmax"}
_UNTAGGED = {"polar", "complex", "lerp", "nan_to_num", "where"}
# Handles whose own sizes or memory an operator changes.
_REBINDS = {"resize_", "resize_as_", "set_"}
# Memory that is in truth shared, and writes that the schema keeps quiet about: (argument, flag).
# Operators whose result's shape and dtype never depend on what the tensors hold, and whose kernels
# can be tried on zeros. (Not all can: some write past the end, some say that zeros will not do.)
_NAMES = """
add sub mul div pow copy_ where clamp relu gelu silu sigmoid tanh softmax _softmax _log_softmax
arange linspace logspace eye tril_indices triu_indices full zeros ones hann_window empty_like
cat stack sum mean prod amax amin max min any all std var norm linalg_vector_norm cumsum cumprod
mm addmm bmm mv dot vdot outer addmv addr baddbmm addbmm linalg_cross trace linalg_qr _linalg_svd
_linalg_eigh linalg_matrix_exp linalg_norm linalg_matrix_norm geqrf linalg_householder_product
triu tril repeat flip roll rot90 block_diag diag diag_embed diagonal_copy
constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
index_select gather embedding take scatter scatter_ scatter_add scatter_add_ index_add index_fill
index_copy index_add_ index_fill_ index_copy_ addmm_ addmv_ addr_ baddbmm_ aminmax _linalg_det
_linalg_slogdet sort topk kthvalue argsort argmax argmin std_mean var_mean logsumexp logcumsumexp
count_nonzero bucketize searchsorted sign reciprocal sqrt rsqrt exp log sin cos fill_ add_ sub_
mul_ div_ pow_ clamp_ masked_fill masked_fill_ clone _to_copy index index_put_ native_layer_norm
native_batch_norm native_group_norm convolution max_pool2d_with_indices _adaptive_avg_pool2d
avg_pool2d _weight_norm_interface upsample_nearest2d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d affine_grid_generator grid_sampler_2d im2col col2im pixel_shuffle
channel_shuffle glu _prelu_kernel mse_loss nll_loss_forward renorm _cdist_forward
_fft_r2c _fft_c2c _fft_c2r fft_fftfreq fft_rfftfreq hamming_window bartlett_window _trilinear
"""
_BY_SHAPE = frozenset(_NAMES.split())
_HIDDEN_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"}
_HIDDEN_WRITES = {
    "native_batch_norm": (("running_mean", "running_var"), "training"),
    "rrelu_with_noise": (("noise",), "training"),
    "rrelu_with_noise_": (("noise",), "training"),
}


plans: dict[Any, Plan] = {}


def plan_for(func: Any) -> Plan:
    """Return the plan of an overload, made at its first use."""
    plan = plans.get(func)
    if plan is None:
        plan = plans[func] = Plan(func)
    return plan


class Plan:
    """What the recorder needs to know of one overload."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name = schema.name.partition("::")[2]
        own = schema.name.startswith("aten::")
        self.foreign = not own
        arguments = schema.arguments
        self.argument_names = [a.name for a in arguments]
        self.generator = "generator" in self.argument_names
        # Where a generator that need not be named comes last among the arguments.
        given = self.generator and not arguments[-1].kwarg_only
        self.generator_at = len(arguments) - 1 if given else None
        self.random = self.generator or torch.Tag.nondeterministic_seeded in func.tags
        self.writes = [
            (i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        if schema.name.startswith("c10d::"):  # collectives write in place, which they do not say
            self.writes = [(i, a.name) for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.returns = [_origin(r, arguments) for r in schema.returns]
        self.tensors_only = all("Tensor" in str(r.type) for r in schema.returns)
        self.checks = not schema.returns and not self.writes  # what it finds is whether to fail
        self.inplace = self.writes == [(0, arguments[0].name)] if arguments else False
        self.overwrites = own and (
            self.name in _OVERWRITES.split() or (bool(self.writes) and self.writes[0][0] != 0)
        )
        rebinds = own and self.name in _REBINDS
        self.views_metadata = torch.Tag.inplace_view in func.tags or rebinds
        self.is_like = own and self.name in _LIKES and _fills(self.name, schema)
        self.fill = _LIKES.get(self.name) if self.is_like else None
        self.fills = self.inplace and not self.views_metadata and self.name not in _HIDDEN_WRITES
        self.hidden = _HIDDEN_WRITES.get(self.name) if own else None
        if own and self.name in _HIDDEN_VIEWS:
            self.returns = [0]
        self.elementwise = own and self._is_elementwise(func)
        keeps = self.elementwise or (own and self.name in _KEEPS_SIZES)
        self.keeps_sizes = keeps and (self.inplace or not self.writes)
        self.sized = self.is_like and self.name in _SIZED
        listed = self.elementwise or self.name in _BY_SHAPE
        self.by_shape = listed or self.name.startswith("_foreach_")
        self.composite = autograd_hooks.is_composite(func)
        # Where a number may come in place of a tensor that the overload itself takes no number for.
        tensors = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
        self.numbers = [] if autograd_hooks.takes_numbers(self.name) else tensors[1:]
        self.adapts = bool(self.numbers) or self.generator_at is not None

    def _is_elementwise(self, func: Any) -> bool:
        """Tell whether every element of the one result comes from its own place alone."""
        tag = getattr(torch.Tag, "pointwise", None)
        known = tag in func.tags or self.name in _UNTAGGED
        return known and len(self.returns) == 1 and not self.random

    def argument(self, name: str, args: Any, kwargs: Any, default: Any = None) -> Any:
        """Return what was passed for ``name``, or ``default``."""
        if name in kwargs:
            return kwargs[name]
        try:
            index = self.argument_names.index(name)
        except ValueError:
            return default
        return args[index] if index < len(args) else default

    def written(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the tensors that a call writes, lists flattened."""
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]
        if self.hidden and self.argument(self.hidden[1], args, kwargs, False):
            found += [self.argument(name, args, kwargs) for name in self.hidden[0]]
        return [t for t in flat(found) if t is not None]


def _origin(result: Any, arguments: Any) -> int | None:
    """Return the index of the argument that an output is, or is a view of; None for new memory."""
    alias = result.alias_info
    if alias is None:
        return None
    for i, a in enumerate(arguments):
        # A list of views (split, unbind) carries an empty set of its own.
        mine = a.alias_info
        if mine and (not alias.before_set or mine.before_set & alias.before_set):
            return i
    return None


def _fills(name: str, schema: Any) -> bool:
    """Tell whether an overload is the plain form of a factory (``normal`` of tensors is not)."""
    if schema.overload_name in ("out", "names", "names_out", "generator_with_names"):
        return False
    if any(a.alias_info for a in schema.arguments):
        return False
    if name == "normal":
        return bool(schema.overload_name == "float_float")
    if name in ("full", "full_like", "new_full", "randint_like"):
        return all("Tensor" not in str(a.type) for a in schema.arguments[1:])
    return True
