#include "comm/node/crossings.h"

#include <algorithm>
#include <utility>

#include "comm/node/window_policy.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

Crossings::Crossings(NodeLayout layout, int self, NodeCollectives collectives, bool windows)
    : layout_(std::move(layout)), self_(self), collectives_(collectives), windows_(windows) {}

bool Crossings::by_window(std::int64_t bytes, std::int64_t least) const {
  return windows_ && layout_.nodes() < layout_.ranks() && goes_by_window(collectives_, bytes, least);
}

template <typename OfMember>
Crossings::Bytes Crossings::sum(const OfMember& of_member) const {
  Bytes bytes;
  if (layout_.nodes() == 1) return bytes;
  for (const int member : layout_.members(layout_.node(self_))) {
    const std::int64_t sent = of_member(member);
    bytes.node += sent;
    if (member == self_) bytes.own = sent;
  }
  return bytes;
}

Crossings::Bytes Crossings::to_all(std::int64_t bytes, int givers) const {
  checked_multiply(bytes, layout_.ranks());  // the caller's count is unchecked
  const auto here = static_cast<std::int64_t>(layout_.members(layout_.node(self_)).size());
  return sum([&](int member) { return member < givers ? bytes * (layout_.ranks() - here) : 0; });
}

Crossings::Bytes Crossings::all_gather(std::int64_t count, DataType dtype) const {
  const std::int64_t bytes = checked_multiply(count, size_of(dtype));
  checked_multiply(bytes, layout_.ranks());
  if (!by_window((layout_.ranks() - 1) * bytes, least_gathered_bytes)) return to_all(bytes);
  return sum([&](int) { return bytes * (layout_.nodes() - 1); });
}

Crossings::Bytes Crossings::reduce_scatter(std::int64_t count, DataType dtype,
                                           const ReductionOptions& options) const {
  const std::int64_t width = size_of(dtype);
  checked_multiply(checked_multiply(count, size_of(DataType::float32)), layout_.ranks());
  if (!by_window((layout_.ranks() - 1) * count * width, least_summed_bytes)) {
    return to_all(count * width, options.givers);
  }
  const std::lock_guard lock(mutex_);
  const std::tuple<int, int, std::int64_t> key{options.group_size, options.givers, width};
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    found = plans_.emplace(key, ReducePlan(layout_, options.group_size, width, options.givers)).first;
  }
  const ReducePlan& plan = found->second;
  const int node = layout_.node(self_);
  const auto& raw = plan.raw(node);
  const auto others = layout_.ranks() - static_cast<std::int64_t>(layout_.members(node).size());
  return sum([&](int member) {
    const bool as_it_is = std::find(raw.begin(), raw.end(), member) != raw.end();
    return count * (plan.sums_sent(layout_, member) * 4 + (as_it_is ? others * width : 0));
  });
}

}  // namespace tranche::comm
