// Texts whose tokens lie behind one another in one array of rows.
#pragma once

#include <vector>

#include "kernels.h"

namespace machd {

struct Text {
  long begin, length;  // rows
};
using Texts = std::vector<Text>;

// Raises std::invalid_argument where a text has no rows, or all together have not as many as there are.
Texts texts_of(const std::vector<int>& lengths, long rows);

// Queries, keys and values of each row, `hidden` numbers each, one behind another.
struct ProjectedRows {
  const float* data;  // [rows, 3 hidden]
  long hidden, heads;
};

// Attends each row to all rows of its text, on all threads: out [rows, hidden].
void attend_within(const Texts& texts, const ProjectedRows& rows, float* out, const Kernels& kernels);

}  // namespace machd
