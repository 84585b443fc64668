// How fields of parameters become attributes of Python's objects. What is out of range raises ValueError where it is
// set.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "params.h"
#include "require.h"

namespace cutlass_fmha {

constexpr int64_t kMaxStride = INT64_MAX / 2;

inline void require_range(char const* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, [&] {
    return std::string(name) + " must be between " + std::to_string(least) + " and " + std::to_string(most) + ", got " +
           std::to_string(value);
  });
}

/// A pointer as an int, 0 where nothing is given. `field`: a member, or a function that finds a reference to it.
template <class Params, class... Base, class Field>
void address(pybind11::class_<Params, Base...>& c, char const* name, Field field) {
  c.def_property(
      name, [=](Params& p) { return reinterpret_cast<uintptr_t>(std::invoke(field, p)); },
      [=](Params& p, uintptr_t value) {
        auto& place = std::invoke(field, p);
        place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(value);
      });
}

/// An integer of a range.
template <class Params, class Owner, class Integer>
void number(pybind11::class_<Params>& c, char const* name, Integer Owner::* field, int64_t least = 0,
            int64_t most = kMaxSeqlen) {
  c.def_property(
      name, [=](Params const& p) { return p.*field; },
      [=](Params& p, int64_t value) {
        require_range(name, value, least, most);
        p.*field = static_cast<Integer>(value);
      });
}

/// One stride, or a number of rows that one is as much as.
template <class Params, class Owner>
void stride(pybind11::class_<Params>& c, char const* name, int64_t Owner::* field) {
  number(c, name, field, 0, kMaxStride);
}

/// The strides of a struct of `Count` int64_t, or of an array of them, as a tuple.
template <int Count, class Params, class... Base, class Owner, class Field>
void strides(pybind11::class_<Params, Base...>& c, char const* name, Field Owner::* field) {
  static_assert(sizeof(Field) == Count * sizeof(int64_t));
  c.def_property(
      name,
      [=](Params const& p) {
        auto const* values = reinterpret_cast<int64_t const*>(&(p.*field));
        pybind11::tuple found(Count);
        for (int i = 0; i < Count; ++i) found[i] = values[i];
        return found;
      },
      [=](Params& p, std::array<int64_t, Count> const& values) {
        for (int64_t value : values) require_range(name, value, 0, kMaxStride);
        std::copy(values.begin(), values.end(), reinterpret_cast<int64_t*>(&(p.*field)));
      });
}

/// Parameters of a kernel, which `make` begins with. A copy of them is made for one call: threads that share a plan
/// must not meet in its parameters.
template <class Params>
pybind11::class_<Params> params_class(
    pybind11::module_& m, char const* name, Params (*make)() = [] { return Params{}; }) {
  pybind11::class_<Params> c(m, name);
  c.def(pybind11::init(make));
  c.def("copy", [](Params const& p) { return p; });
  return c;
}

}  // namespace cutlass_fmha
