// The plain twin of attention: scores, softmax and sum one number at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace machd::plain {

long attend_scratch_bytes(long, long, long) { return 0; }

void attend(const Attention& a, long begin, long end, void*) {
  const auto key_at = [&](long position) {
    const KvPart& part = a.parts[position >= a.parts[0].columns];
    return part.keys + part.column(position - (&part == a.parts ? 0 : a.parts[0].columns)) * part.key_step;
  };
  const auto value_at = [&](long position) {
    const KvPart& part = a.parts[position >= a.parts[0].columns];
    return part.values + part.column(position - (&part == a.parts ? 0 : a.parts[0].columns)) * part.value_step;
  };
  for (long token = begin; token < end; ++token)
    for (long head = 0; head < a.repeats; ++head) {
      const float* query = a.queries + token * a.query_token_step + head * a.query_head_step;
      const long own = a.before + token, to = std::min(own + 1, a.held());
      std::vector<double> scores;
      std::vector<long> seen;
      for (long position = 0; position < to; ++position) {
        if (a.window != 0 && position <= own - a.window) continue;
        double score = 0;
        for (long d = 0; d < a.head_dim; ++d) score += double(query[d]) * key_at(position)[d];
        scores.push_back(score * a.scale);
        seen.push_back(position);
      }
      const double highest = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
      double total = 0;
      for (double& score : scores) total += score = std::exp(score - highest);
      for (long d = 0; d < a.value_dim; ++d) {
        double sum = 0;
        for (size_t at = 0; at < seen.size(); ++at) sum += scores[at] * value_at(seen[at])[d];
        a.out[token * a.out_token_step + head * a.out_head_step + d] = float(sum / total);
      }
    }
}

}  // namespace machd::plain
