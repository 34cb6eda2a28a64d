// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "primitives.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_kernels, m) {
  nb::module_::import_("mlx.core");
  m.def(
      "product",
      &machd::product,
      "x"_a,
      "weights"_a,
      "scales"_a = nb::none(),
      "biases"_a = nb::none(),
      nb::kw_only(),
      "mode"_a = "plain",
      "group"_a = 1,
      "bits"_a = 32);
  m.def("instruction_set", &machd::instruction_set);
  m.def("use_instruction_set", &machd::use_instruction_set, "name"_a);
  m.def("thread_count", &machd::thread_count);
  m.def("set_thread_count", &machd::set_thread_count, "count"_a);
}
