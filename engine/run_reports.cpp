#include "engine/run_reports.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

namespace tranche::detail {

using nlohmann::ordered_json;

std::string memory_report(const Runtime& runtime) {
  ordered_json result = ordered_json::object();
  for (const Tier tier : all_tiers) {
    const TierAccount account = runtime.ledger().account(tier);
    std::vector<std::int64_t> values{account.peak};
    for (const Category category : all_categories) values.push_back(account.category_peak[category]);
    for (const Category category : all_categories) values.push_back(account.persistent[category]);
    runtime.all()
        .all_reduce(values.data(), static_cast<std::int64_t>(values.size()), DataType::int64,
                    ReduceOperation::maximum,
                    OperationLabel{"report", "memory", Traffic::control, Tier::host})
        .wait();
    if (values[0] == 0) continue;
    ordered_json categories = ordered_json::object(), persistent = ordered_json::object();
    for (std::size_t c = 0; c < all_categories.size(); ++c) {
      categories[std::string(name_of(all_categories[c]))] = values[1 + c];
      persistent[std::string(name_of(all_categories[c]))] = values[1 + category_count + c];
    }
    result[std::string(name_of(tier))] = {
        {"peak_bytes", values[0]}, {"by_category", categories}, {"persistent", persistent}};
  }
  const MemoryInfo info = runtime.device().memory_info();
  if (info.total > 0) {
    // The figures are the device's own, so that they add up: memory in use that is not this rank's belongs to
    // the driver, to libraries and to other processes (ranks that share the device among them).
    std::int64_t values[] = {info.total, info.mapped, info.mapped - info.placed,
                             info.total - info.free - info.mapped};
    runtime.all()
        .all_reduce(values, std::size(values), DataType::int64, ReduceOperation::maximum,
                    OperationLabel{"report", "memory", Traffic::control, Tier::host})
        .wait();
    result[std::string(name_of(Tier::device))]["physical"] = {{"total_bytes", values[0]},
                                                              {"mapped_bytes", values[1]},
                                                              {"rounding_bytes", values[2]},
                                                              {"unaccounted_bytes", values[3]}};
  }
  return result.dump();
}

std::string model_report(const ModelSpec& model) {
  return ordered_json{{"parameters", model.parameters()}, {"flops_per_token", model.flops_per_token}}.dump();
}

}  // namespace tranche::detail
