// The Python side of a backward's parameters: those of attention, and the gradients.
#include "../binding.h"
#include "../fields.h"
#include "params.h"

namespace py = pybind11;

namespace cutlass_fmha {

void check(BackwardParams const& p, int element_bytes) {
  check(static_cast<AttentionParams const&>(p), element_bytes);
  if (p.empty()) return;
  struct Address {
    char const* name;
    void const* value;
    bool wanted;
    int bytes;
  };
  bool const queries = p.seqlen_q > 0;
  for (Address const& a : {Address{"lse", p.lse, queries, 4},
                           {"dout", p.dout, queries, element_bytes},
                           {"dlse", p.dlse, false, 4},
                           {"dq", p.dq, false, element_bytes},
                           {"dk", p.dk, false, element_bytes},
                           {"dv", p.dv, false, element_bytes},
                           {"dbias", p.dbias, false, 4},
                           {"dsinks", p.dsinks, false, 4},
                           {"scores", p.scores, false, 16},
                           {"workspace", p.workspace, queries, 16}}) {
    require(!a.wanted || a.value, [&] { return std::string(a.name) + " must be an address"; });
    require(reinterpret_cast<uintptr_t>(a.value) % a.bytes == 0,
            [&] { return std::string(a.name) + " must be aligned to " + std::to_string(a.bytes) + " bytes"; });
  }
}

void bind_backward_params(py::module_& m) {
  using P = BackwardParams;
  py::class_<P, AttentionParams> c(m, "BackwardParams");
  c.def(py::init([](AttentionParams const& forward) {
          P p{};
          static_cast<AttentionParams&>(p) = forward;
          return p;
        }),
        py::arg("forward"));
  address(c, "dout", &P::dout);
  address(c, "dlse", &P::dlse);
  address(c, "dq", &P::dq);
  address(c, "dk", &P::dk);
  address(c, "dv", &P::dv);
  address(c, "dbias", &P::dbias);
  address(c, "dsinks", &P::dsinks);
  c.def_readwrite("ordered", &P::ordered);
  address(c, "workspace", &P::workspace);
  strides<3>(c, "dout_stride", &P::dout_stride);
  strides<3>(c, "dq_stride", &P::dq_stride);
  strides<3>(c, "dk_stride", &P::dk_stride);
  strides<3>(c, "dv_stride", &P::dv_stride);
  strides<4>(c, "dbias_stride", &P::dbias_stride);
  c.def("workspace_floats", &workspace_floats, py::arg("tile_m"), py::arg("tile_n"), py::arg("row_dim"));
  address(c, "scores", &P::scores);
  c.def_property(
      "scores_turn", [](P const& p) { return p.scores_turn; },
      [](P& p, int64_t heads) {
        require_range("scores_turn", heads, 0, INT32_MAX);
        p.scores_turn = int(heads);
      });
  c.def("scores_bytes", &scores_bytes, py::arg("tile_m"), py::arg("tile_n"));
}

}  // namespace cutlass_fmha
