// The Python side of what the kernels beside attention read: objects whose fields are those of params.h.
#include "../binding.h"
#include "../fields.h"
#include "bind_fields.h"
#include "params.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

void bind_rotary(py::module_& m) {
  py::class_<Rotary> c(m, "Rotary");
  c.def(py::init([] { return Rotary{}; }));
  address(c, "cos", &Rotary::cos);
  address(c, "sin", &Rotary::sin);
  stride(c, "cos_stride", &Rotary::cos_stride);
  stride(c, "sin_stride", &Rotary::sin_stride);
  number(c, "positions", &Rotary::positions);
  number(c, "dim", &Rotary::dim);
  c.def_readwrite("interleaved", &Rotary::interleaved);
  c.def_readwrite("float32", &Rotary::float32);
}

void bind_combine(py::module_& m) {
  using P = CombineParams;
  auto c = params_class<P>(m, "CombineParams");
  address(c, "partial_o", &P::partial_o);
  address(c, "partial_lse", &P::partial_lse);
  address(c, "partial_low", &P::partial_low);
  address(c, "o", &P::o);
  address(c, "lse", &P::lse);
  stride(c, "lse_batch_stride", &P::lse_batch_stride);
  stride(c, "lse_head_stride", &P::lse_head_stride);
  stride(c, "lse_rows", &P::lse_rows);
  strides<3>(c, "o_stride", &P::o_stride);
  number(c, "batch", &P::batch);
  number(c, "seqlen_q", &P::seqlen_q);
  number(c, "num_heads", &P::num_heads);
  number(c, "head_dim_v", &P::head_dim_v, 1, P::kMaxHeadDim);
  number(c, "splits", &P::splits, 1, P::kMaxSplits);
}

void bind_merge(py::module_& m) {
  using P = MergeParams;
  auto c = params_class<P>(m, "MergeParams");
  address(c, "o_a", &P::o_a);
  address(c, "o_b", &P::o_b);
  address(c, "o", &P::o);
  address(c, "lse_a", &P::lse_a);
  address(c, "lse_b", &P::lse_b);
  address(c, "lse", &P::lse);
  strides<3>(c, "o_a_stride", &P::o_a_stride);
  strides<3>(c, "o_b_stride", &P::o_b_stride);
  strides<3>(c, "o_stride", &P::o_stride);
  strides<3>(c, "lse_a_stride", &P::lse_a_stride);
  strides<3>(c, "lse_b_stride", &P::lse_b_stride);
  strides<3>(c, "lse_stride", &P::lse_stride);
  number(c, "batch", &P::batch);
  number(c, "seqlen_q", &P::seqlen_q);
  number(c, "num_heads", &P::num_heads);
  number(c, "head_dim_v", &P::head_dim_v);
}

void bind_rotated(py::module_& m) {
  using P = RotaryParams;
  auto c = params_class<P>(m, "RotaryParams");
  address(c, "x", &P::x);
  address(c, "out", &P::out);
  strides<3>(c, "x_stride", &P::x_stride);
  strides<3>(c, "out_stride", &P::out_stride);
  number(c, "batch", &P::batch);
  number(c, "seqlen", &P::seqlen);
  number(c, "num_heads", &P::num_heads);
  number(c, "head_dim", &P::head_dim);
  address(c, "cu_seqlens", &P::cu_seqlens);
  number(c, "sequences", &P::sequences);
  bind_position(c);
  c.def_readwrite("advance", &P::advance);
  c.def_readwrite("rotary", &P::rotary);
}

void bind_append(py::module_& m) {
  using P = AppendParams;
  auto c = params_class<P>(m, "AppendParams");
  address(c, "k_cache", &P::k_cache);
  address(c, "v_cache", &P::v_cache);
  address(c, "k", &P::k);
  address(c, "v", &P::v);
  strides<3>(c, "k_cache_stride", &P::k_cache_stride);
  strides<3>(c, "v_cache_stride", &P::v_cache_stride);
  strides<3>(c, "k_stride", &P::k_stride);
  strides<3>(c, "v_stride", &P::v_stride);
  for (auto const& [name, field] : {std::pair{"batch", &P::batch}, std::pair{"seqlen_new", &P::seqlen_new},
                                    std::pair{"num_heads_kv", &P::num_heads_kv}, std::pair{"head_dim", &P::head_dim},
                                    std::pair{"head_dim_v", &P::head_dim_v}}) {
    number(c, name, field);
  }
  bind_places(c);
  address(c, "seqused_k", &P::seqused_k);
  address(c, "cu_seqlens", &P::cu_seqlens);
  number(c, "sequences", &P::sequences);
  bind_position(c);
  c.def_readwrite("rotary", &P::rotary);
  c.def_readwrite("query", &P::query);
}

}  // namespace

void check(CombineParams const& p) {
  require(p.empty() || (p.splits >= 1 && p.head_dim_v >= 1), [] { return "splits and head_dim_v must be set"; });
}

void check(MergeParams const&) {}

void check(RotaryParams const& p) { check_rotary(p.rotary, p.head_dim); }

void check(AppendParams const& p) {
  require(!p.page_table || p.page_size > 0, [] { return "page_table needs page_size"; });
  check_rotary(p.rotary, p.head_dim);
  require(p.query.empty() || p.query.rotary.cos, [] { return "a query is rotated: it needs a rotary"; });
  check(p.query);
}

void bind_helper_params(py::module_& m) {
  bind_rotary(m);
  bind_combine(m);
  bind_merge(m);
  bind_rotated(m);
  bind_append(m);
}

}  // namespace cutlass_fmha
