#include "engine/rank_texts.h"

#include <algorithm>

#include "tranche/core/error.h"

namespace tranche::detail {

std::vector<std::string> exchange_texts(Communicator& ranks, const std::string& mine, OperationLabel label) {
  const auto count = static_cast<std::size_t>(ranks.size());
  const auto size = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> sizes(count, size);
  ranks.all_gather(&size, sizes.data(), 1, DataType::int64, 0, {}, label).wait();
  const auto largest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine;
  padded.resize(largest);
  std::string all(largest * count, '\0');
  for (std::size_t r = 0; r < count; ++r) all.replace(r * largest, largest, padded);
  if (largest > 0) {
    ranks
        .all_gather(padded.data(), all.data(), static_cast<std::int64_t>(largest), DataType::uint8, 0, {},
                    label)
        .wait();
  }
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < count; ++r) {
    texts.push_back(all.substr(r * largest, static_cast<std::size_t>(sizes[r])));
  }
  return texts;
}

std::vector<std::string> together(Communicator& ranks, OperationLabel label,
                                  const std::function<std::string()>& work) {
  std::string outcome;
  try {
    outcome = "+" + work();
  } catch (const Error& error) {
    outcome = "-" + error.message();
  } catch (const std::exception& error) {
    outcome = std::string("-") + error.what();
  }
  std::vector<std::string> outcomes = exchange_texts(ranks, outcome, label);
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r][0] == '+') continue;
    const std::string who = ranks.size() == 1 ? "" : "rank " + std::to_string(r) + ": ";
    throw CheckpointError(who + outcomes[r].substr(1));
  }
  for (std::string& text : outcomes) text.erase(0, 1);
  return outcomes;
}

}  // namespace tranche::detail
