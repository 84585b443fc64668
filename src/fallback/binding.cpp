// The Python side of fallback rows: their table, and a launch. A kernel believes what it is given: what a row does not
// know, what its 32-bit offsets do not reach and what is not aligned is refused here.
#include "binding.h"

#include <pybind11/stl.h>

#include <climits>
#include <string>
#include <vector>

#include "../binding.h"
#include "../general/params.h"
#include "config.h"

#if CUTLASS_FMHA_CUDA
#include "table.h"
#endif

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

char const* name_of(FallbackMath math) {
  switch (math) {
    case FallbackMath::simt:
      return "simt";
    case FallbackMath::tf32x3:
      return "tf32x3";
    case FallbackMath::mma:
      return "mma";
  }
  return "";
}

#if CUTLASS_FMHA_CUDA

/// Python's view of a row: a copy, with its row number.
struct FallbackRow : FallbackTemplate {
  int index;
};

std::vector<FallbackRow> fallback_rows() {
  std::vector<FallbackRow> rows;
  for (FallbackTemplate const& t : fallback_templates()) rows.push_back({t, static_cast<int>(rows.size())});
  return rows;
}

void check_features(FallbackTemplate const& t, GeneralParams const& p) {
  struct Feature {
    char const* name;
    bool given;
  };
  for (Feature const& f : {Feature{"page_table", p.page_table != nullptr},
                           {"window_left", p.window_left >= 0},
                           {"prefix_lengths", p.prefix_lengths != nullptr},
                           {"mask", p.mask != nullptr},
                           {"block_counts", p.block_counts != nullptr},
                           {"softcap", p.softcap != 0.f},
                           {"alibi_slopes", p.alibi_slopes != nullptr},
                           {"sinks", p.sinks != nullptr},
                           {"dropout_threshold", p.dropout_threshold != 0},
                           {"splits", p.splits != 1}}) {
    require(!f.given, [&] { return std::string(t.name) + " does not know " + f.name; });
  }
  bool const same = t.config.element == Element::float32 || p.bias_type == BiasType::same_as_q;
  require(!p.bias || same, [&] { return std::string(t.name) + " takes a bias of its own dtype only"; });
}

void check_sizes(FallbackTemplate const& t, GeneralParams const& p) {
  auto const text = [](int64_t value) { return std::to_string(value); };
  require(p.head_dim > 0 && p.head_dim_v > 0 && p.head_dim <= t.config.head_dim && p.head_dim_v <= t.config.head_dim,
          [&] {
            return std::string(t.name) + " takes head dims from 1 to " + text(t.config.head_dim) + ", got " +
                   text(p.head_dim) + " and " + text(p.head_dim_v);
          });
  require(p.num_heads_kv > 0 ? p.num_heads % p.num_heads_kv == 0 : p.num_heads == 0, [&] {
    return "num_heads (" + text(p.num_heads) + ") must be a multiple of num_heads_kv (" + text(p.num_heads_kv) + ")";
  });
  require(p.pack == 1 || (p.seqlen_q <= 1 && p.num_heads > 0 && p.pack == p.num_heads / p.num_heads_kv),
          [&] { return "pack must be 1 or, with a seqlen_q of 1, num_heads / num_heads_kv, got " + text(p.pack); });
}

/// Bytes that something must be a multiple of, or an exception that names it.
void require_multiple(FallbackTemplate const& t, char const* what, uint64_t value, int bytes) {
  require(value % bytes == 0, [&] {
    return std::string(t.name) + " needs " + what + " to be a multiple of " + std::to_string(bytes) + " bytes";
  });
}

void check_alignment(FallbackTemplate const& t, GeneralParams const& p) {
  int const bytes = t.config.alignment(), size = element_bytes(t.config.element);
  constexpr int kVector = 16;
  struct Operand {
    char const* name;
    void const* address;
    Strides stride;
  };
  for (Operand const& x : {Operand{"q", p.q, p.q_stride}, Operand{"k", p.k, p.k_stride}, Operand{"v", p.v, p.v_stride},
                           Operand{"o", p.o, p.o_stride}}) {
    uint64_t const strides = (x.stride.batch | x.stride.seqlen | x.stride.head) * size;
    require_multiple(t, x.name, reinterpret_cast<uintptr_t>(x.address) | strides, bytes);
  }
  require_multiple(t, "head_dim and head_dim_v", uint64_t(p.head_dim | p.head_dim_v) * size, bytes);
  // A bias is read in vectors whatever the row: its rows are whole ones, and keys are its last dimension.
  ScoreStrides const& s = p.bias_stride;
  require(!p.bias || p.seqlen_k <= 1 || s.key == 1, [] { return "bias must be contiguous in its last dimension"; });
  if (p.bias) {
    require_multiple(t, "bias", reinterpret_cast<uintptr_t>(p.bias) | (s.batch | s.head | s.query) * size, kVector);
  }
}

/// The example multiplies a row's number and its stride in 32 bits.
void check_offsets(FallbackTemplate const& t, GeneralParams const& p) {
  auto const fits = [&](char const* name, int64_t rows, int64_t stride) {
    require(stride <= INT_MAX && rows * stride <= INT_MAX, [&] {
      return std::string(t.name) + ": its offsets are 32-bit, and " + name + " spans " + std::to_string(rows) +
             " rows with a stride of " + std::to_string(stride) + " elements";
    });
  };
  int64_t const keys = int64_t(p.seqlen_k) + t.config.tile_n;
  fits("k", keys, p.k_stride.seqlen);
  fits("v", keys, p.v_stride.seqlen);
  fits("q", 1, p.pack == 1 ? p.q_stride.seqlen : p.q_stride.head);
  fits("o", 1, p.pack == 1 ? p.o_stride.seqlen : p.o_stride.head);
  fits("o", p.num_heads, p.head_dim_v);
  if (p.bias) fits("bias", 1, p.pack == 1 ? p.bias_stride.query : p.bias_stride.head);
}

void check_addresses(FallbackTemplate const& t, GeneralParams const& p) {
  bool const queries = p.batch > 0 && p.num_heads > 0 && p.seqlen_q > 0;
  require(!queries || (p.q && p.o), [] { return "q and o must be addresses"; });
  require(!queries || p.seqlen_k == 0 || (p.k && p.v), [] { return "k and v must be addresses"; });
  if (!queries || !t.config.accumulates() || p.partial_o) return;
  int64_t const step = p.pack == 1 ? p.o_stride.seqlen : p.o_stride.head;
  int64_t const rows = p.pack == 1 ? p.num_heads : 1;
  require(t.config.element == Element::float32 && step == rows * p.head_dim_v,
          [&] { return std::string(t.name) + " needs partial_o: float32, as many elements as o"; });
}

/// `params` by value: another thread may write to the Python object while this one launches.
void run_fallback(int row, GeneralParams params, int device, uintptr_t stream) {
  auto const& rows = fallback_templates();
  require(row >= 0 && row < static_cast<int>(rows.size()), [&] {
    return "row must be one of the " + std::to_string(rows.size()) + " fallback rows, got " + std::to_string(row);
  });
  check_features(rows[row], params);
  check_sizes(rows[row], params);
  check_alignment(rows[row], params);
  check_offsets(rows[row], params);
  check_addresses(rows[row], params);
  // A full launch queue makes the driver wait, maybe for a host callback that wants the interpreter.
  py::gil_scoped_release unlocked;
  launch_fallback(row, params, device, reinterpret_cast<cudaStream_t>(stream));
}

#else

struct FallbackRow {
  int index;
  char const* name;
  FallbackConfig config;
  int smem_bytes;
};

std::vector<FallbackRow> fallback_rows() { return {}; }
void run_fallback(int, GeneralParams const&, int, uintptr_t) { no_cuda(); }

#endif

}  // namespace

void bind_fallback(py::module_& m) {
  using Row = FallbackRow;
  py::class_<Row>(m, "FallbackTemplate")
      .def_readonly("index", &Row::index)
      .def_property_readonly("name", [](Row const& t) { return t.name; })
      .def_readonly("smem_bytes", &Row::smem_bytes)
      .def_property_readonly("arch", [](Row const& t) { return t.config.arch; })
      .def_property_readonly("dtype", [](Row const& t) { return name_of(t.config.element); })
      .def_property_readonly("head_dim", [](Row const& t) { return t.config.head_dim; })
      .def_property_readonly("head_dim_v", [](Row const& t) { return t.config.head_dim; })
      .def_property_readonly("tile_m", [](Row const& t) { return t.config.tile_m; })
      .def_property_readonly("tile_n", [](Row const& t) { return t.config.tile_n; })
      .def_property_readonly("warps", [](Row const& t) { return t.config.warps; })
      .def_property_readonly("min_blocks", [](Row const& t) { return t.config.min_blocks; })
      .def_property_readonly("math", [](Row const& t) { return name_of(t.config.math); })
      .def_property_readonly("alignment", [](Row const& t) { return t.config.alignment(); })
      .def_property_readonly("accumulates", [](Row const& t) { return t.config.accumulates(); })
      .def_property_readonly("example", [](Row const& t) { return t.config.example(); })
      .def_property_readonly("fallback", [](Row const&) { return true; })
      .def("__repr__", [](Row const& t) { return "<FallbackTemplate " + std::string(t.name) + ">"; });
  m.def("fallback_templates", &fallback_rows);
  m.def("run_fallback", &run_fallback, py::arg("row"), py::arg("params"), py::arg("device"), py::arg("stream"));
}

}  // namespace cutlass_fmha
