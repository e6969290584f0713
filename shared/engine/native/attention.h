// Causal attention of packed sequences over KV pages [pages][2][block_tokens][kv_heads][head_dim].
//
// The query heads that share a KV head are rows of one unit of work. With few rows (decode), the logits are dot products,
// computed in chunks of CHUNK keys counted from position 0. The chunks are merged in order. So the work of a long context
// is spread over threads, but no sum depends on how. With many rows (prefill), each tile of keys goes through two small
// matrix products with a running softmax.
#pragma once

#include "few_rows.h"
#include "many_rows.h"

// This thread's share of one layer's attention. All threads call attend_share, then wait at a barrier, then call
// merge_share.
template <class T>
static void attend_share(Plan& plan, const Reach& reach, const T* base, const float* queries, float* output,
                         Scratch& scratch) {
  for (;;) {
    int i = plan.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= int(plan.units.size())) return;
    const Unit& unit = plan.units[i];
    if (unit.few)
      few_rows(plan, unit, reach, base, queries, scratch);
    else
      many_rows(plan, unit, reach, base, queries, output, scratch);
  }
}

template <class T>
static void merge_share(const Hand& hand, const Plan& plan, float* output) {
  int turn = 0;
  for (size_t i = 0; i < plan.units.size();) {
    const Unit& first = plan.units[i];
    if (!first.few) {
      i++;
      continue;
    }
    size_t j = i + 1;
    while (j < plan.units.size() && plan.units[j].few && plan.units[j].span == first.span && plan.units[j].head == first.head) j++;
    for (int h = 0; h < first.heads; h++)
      if (turn++ % hand.threads == hand.thread)
        merge<T>(plan, first.span, first.head + h, first.part + h, first.heads, int(j - i), output);
    i = j;
  }
}
