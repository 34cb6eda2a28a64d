// Weights in pages of 2 MiB: with those of 4 KiB a processor looks up addresses for as long as it reads what is there, in a virtual
// machine above all.
#pragma once

#include "mlx/array.h"

namespace machd {

// The array, computed, in large pages where the system has them: copied into memory that is kept as long as an array in it, or, from
// 32 MiB on, where it is. Returns `array` itself on other systems, where a GPU's allocator holds it, and where it lies well already.
mlx::core::array in_large_pages(const mlx::core::array& array);

}  // namespace machd
