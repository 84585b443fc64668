// The Python side of rope_params.h.
#include "../binding.h"
#include "../helpers/bind_fields.h"
#include "rope_params.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

void bind_rows(py::module_& m) {
  using P = RopeRows;
  py::class_<P> c(m, "RopeRows");
  c.def(py::init([] { return P{}; }));
  address(c, "x", &P::x);
  address(c, "out", &P::out);
  address(c, "weight", &P::weight);
  address(c, "gradient", &P::gradient);
  address(c, "partial", &P::partial);
  address(c, "weight_gradient", &P::weight_gradient);
  strides<3>(c, "x_stride", &P::x_stride);
  strides<3>(c, "out_stride", &P::out_stride);
  strides<3>(c, "gradient_stride", &P::gradient_stride);
  number(c, "num_heads", &P::num_heads);
  number(c, "head_dim", &P::head_dim);
  c.def_readwrite("weight_float32", &P::weight_float32);
}

template <class P>
py::class_<P> bind(py::module_& m, char const* name) {
  auto c = params_class<P>(m, name);
  c.def_readwrite("q", &P::q);
  c.def_readwrite("k", &P::k);
  c.def_readwrite("v", &P::v);
  number(c, "batch", &P::batch);
  number(c, "seqlen", &P::seqlen);
  number(c, "head_dim", &P::head_dim);
  address(c, "cu_seqlens", &P::cu_seqlens);
  number(c, "sequences", &P::sequences);
  bind_position(c);
  number(c, "start", &P::start, INT32_MIN, INT32_MAX);
  address(c, "positions", &P::positions);
  strides<2>(c, "positions_stride", &P::positions_stride);
  c.def_readwrite("rotary", &P::rotary);
  address(c, "inv_freq", &P::inv_freq);
  c.def_readwrite("inverse", &P::inverse);
  c.def_readwrite("norm", &P::norm);
  c.def_readwrite("eps", &P::eps);
  c.def_readwrite("weight_offset", &P::weight_offset);
  address(c, "seqused_k", &P::seqused_k);
  bind_places(c);
  return c;
}

}  // namespace

void check(RopeParams const& p) {
  require(!p.page_table || p.page_size > 0, [] { return "page_table needs page_size"; });
  check_rotary(p.rotary, p.head_dim);
  require(p.rotary.dim == 0 || p.rotary.cos || p.inv_freq, [] { return "a rotation has cos and sin, or inv_freq"; });
}

void bind_rope_params(py::module_& m) {
  bind_rows(m);
  bind<RopeParams>(m, "RopeParams");
  auto backward = bind<RopeBackwardParams>(m, "RopeBackwardParams");
  number(backward, "parts", &RopeBackwardParams::parts, 1);
  backward.def("parts_of", [](RopeBackwardParams const& p, RopeRows const& rows) { return p.parts_of(rows); });
}

}  // namespace cutlass_fmha
