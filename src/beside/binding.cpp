// The Python side of what the kernels on rows read: objects whose fields are those of params.h.
#include <climits>
#include <cmath>
#include <initializer_list>

#include "../binding.h"
#include "../fields.h"
#include "params.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

/// One of an enumeration's names, of which there are `count`.
template <class Params, class Owner, class Enum>
void named(py::class_<Params>& c, char const* name, Enum Owner::* field, int count) {
  c.def_property(
      name, [=](Params const& p) { return name_of(p.*field); },
      [=](Params& p, std::string const& value) {
        for (int n = 0; n < count; ++n) {
          if (value == name_of(Enum(n))) {
            p.*field = Enum(n);
            return;
          }
        }
        throw std::invalid_argument(std::string(name) + " is none of those that there are: " + value);
      });
}

template <class Params, class Owner>
void finite(py::class_<Params>& c, char const* name, float Owner::* field) {
  c.def_property(
      name, [=](Params const& p) { return p.*field; },
      [=](Params& p, double value) {
        require(std::isfinite(float(value)),
                [&] { return std::string(name) + " must be a finite float, got " + std::to_string(value); });
        p.*field = float(value);
      });
}

template <class Params>
py::class_<Params> rows_class(py::module_& m, char const* name, int max_dim) {
  auto c = params_class<Params>(m, name);
  strides<3>(c, "sizes", &Params::sizes);
  number(c, "dim", &Params::dim, 1, max_dim);
  return c;
}

void bind_rms_norm(py::module_& m) {
  using P = RmsNormParams;
  auto c = rows_class<P>(m, "RmsNormParams", 65536);
  address(c, "x", &P::x);
  address(c, "residual", &P::residual);
  address(c, "sum", &P::sum);
  address(c, "weight", &P::weight);
  address(c, "bias", &P::bias);
  address(c, "out", &P::out);
  address(c, "rstd", &P::rstd);
  strides<3>(c, "x_stride", &P::x_stride);
  strides<3>(c, "residual_stride", &P::residual_stride);
  strides<3>(c, "sum_stride", &P::sum_stride);
  strides<3>(c, "out_stride", &P::out_stride);
  finite(c, "eps", &P::eps);
  finite(c, "weight_offset", &P::weight_offset);
  named(c, "out_type", &P::out_type, kDTypes);
  named(c, "weight_type", &P::weight_type, kDTypes);
}

void bind_rms_norm_backward(py::module_& m) {
  using P = RmsNormBackwardParams;
  auto c = rows_class<P>(m, "RmsNormBackwardParams", 65536);
  address(c, "dout", &P::dout);
  address(c, "dsum", &P::dsum);
  address(c, "x", &P::x);
  address(c, "weight", &P::weight);
  address(c, "rstd", &P::rstd);
  address(c, "dx", &P::dx);
  address(c, "dweight", &P::dweight);
  address(c, "partial", &P::partial);
  strides<3>(c, "dout_stride", &P::dout_stride);
  strides<3>(c, "dsum_stride", &P::dsum_stride);
  strides<3>(c, "x_stride", &P::x_stride);
  strides<3>(c, "dx_stride", &P::dx_stride);
  finite(c, "weight_offset", &P::weight_offset);
  named(c, "out_type", &P::out_type, kDTypes);
  named(c, "weight_type", &P::weight_type, kDTypes);
  number(c, "parts", &P::parts, 0, 65535);
  c.def("partial_floats", &P::partial_floats);
}

template <class P>
py::class_<P> gated_class(py::module_& m, char const* name) {
  auto c = rows_class<P>(m, name, INT_MAX);
  address(c, "gate", &P::gate);
  address(c, "up", &P::up);
  address(c, "out", &P::out);
  strides<3>(c, "gate_stride", &P::gate_stride);
  strides<3>(c, "up_stride", &P::up_stride);
  strides<3>(c, "out_stride", &P::out_stride);
  named(c, "activation", &P::activation, 3);
  return c;
}

void bind_gated(py::module_& m) {
  using P = GatedBackwardParams;
  gated_class<GatedParams>(m, "GatedParams");
  auto c = gated_class<P>(m, "GatedBackwardParams");
  address(c, "dout", &P::dout);
  address(c, "dgate", &P::dgate);
  address(c, "dup", &P::dup);
  strides<3>(c, "dout_stride", &P::dout_stride);
  strides<3>(c, "dgate_stride", &P::dgate_stride);
  strides<3>(c, "dup_stride", &P::dup_stride);
}

/// Rows whose numbers are divided as 31-bit ones, and addresses that must be there, by their names.
void check_rows(RowsParams const& p, char const* names, std::initializer_list<void const*> addresses) {
  int64_t rows = 1;
  for (int64_t size : p.sizes) {
    require(size <= INT_MAX && (size == 0 || rows <= INT_MAX / size),
            [] { return "at most 2147483647 rows can be taken"; });
    rows *= size;
  }
  if (rows == 0) return;
  for (void const* each : addresses) {
    require(each, [&] { return std::string(names) + " must be addresses"; });
  }
  require(p.dim >= 1, [] { return "dim must be set"; });
}

}  // namespace

void check(RmsNormParams const& p) {
  check_rows(p, "x and out", {p.x, p.out});
  require(!p.residual == !p.sum, [] { return "residual and sum go together"; });
}

void check(RmsNormBackwardParams const& p) {
  check_rows(p, "x, dout, rstd and dx", {p.x, p.dout, p.rstd, p.dx});
  require(!p.dweight || (p.partial && p.parts > 0), [] { return "dweight needs parts, and partial for them"; });
  require(reinterpret_cast<uintptr_t>(p.partial) % 16 == 0, [] { return "partial must be aligned to 16 bytes"; });
}

void check(GatedParams const& p) { check_rows(p, "gate, up and out", {p.gate, p.up, p.out}); }

void check(GatedBackwardParams const& p) {
  check_rows(p, "gate, up, dout, dgate and dup", {p.gate, p.up, p.dout, p.dgate, p.dup});
}

void bind_beside_params(py::module_& m) {
  bind_rms_norm(m);
  bind_rms_norm_backward(m);
  bind_gated(m);
}

}  // namespace cutlass_fmha
