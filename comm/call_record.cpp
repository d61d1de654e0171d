#include "comm/call_record.h"

#include <algorithm>

namespace tranche::comm {

void CallRecord::add(const CallSignature& mine) {
  auto* sequence = const_cast<Sequence*>(find(mine.context));
  if (sequence == nullptr) sequence = &sequences_.emplace_back(Sequence{mine.context, {}});
  sequence->calls.push_back(mine);
  if (sequence->calls.size() > kept) sequence->calls.pop_front();
}

std::optional<CallSignature> CallRecord::same_number(const CallSignature& theirs) const {
  const Sequence* sequence = find(theirs.context);
  if (sequence == nullptr) return std::nullopt;
  const std::uint64_t first = sequence->calls.front().number;
  if (theirs.number < first || theirs.number - first >= sequence->calls.size()) return std::nullopt;
  return sequence->calls[static_cast<std::size_t>(theirs.number - first)];
}

bool CallRecord::comes(const CallSignature& theirs) const {
  const Sequence* sequence = find(theirs.context);
  return sequence == nullptr || theirs.number > sequence->calls.back().number;
}

const CallRecord::Sequence* CallRecord::find(int context) const {
  const auto found = std::find_if(sequences_.begin(), sequences_.end(),
                                  [&](const Sequence& each) { return each.context == context; });
  return found == sequences_.end() ? nullptr : &*found;
}

}  // namespace tranche::comm
