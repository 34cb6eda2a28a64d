// The table of one instruction set's kernels.
#include "kernels.h"

#define MACHD_NAME(target) MACHD_NAME_OF(target)
#define MACHD_NAME_OF(target) #target

namespace machd::MACHD_TARGET {

extern const Kernels kernels;
const Kernels kernels = {
    .name = MACHD_NAME(MACHD_TARGET),
    .find_product = find_product,
    .arranges_rows = arranges_rows,
    .arrange_rows = arrange_rows,
    .product_scratch_bytes = product_scratch_bytes,
    .attend = attend,
    .attend_scratch_bytes = attend_scratch_bytes,
    .multiply_panels = multiply_panels,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .gelu = gelu,
    .mean_of_rows = mean_of_rows,
    .silu_product = silu_product,
    .gelu_product = gelu_product,
    .rotate = rotate,
    .add_low_rank = add_low_rank,
};

}  // namespace machd::MACHD_TARGET
