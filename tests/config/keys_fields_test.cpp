// Every field of Config belongs to exactly one row of the table, and the default in the table is the field's
// default.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "config/keys.h"
#include "tests/core/error_text.h"

namespace tranche {
namespace {

using detail::ConfigKey;
using detail::configuration_keys;
using detail::Json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Stands for a value of any type in braces.
struct Anything {
  template <typename T>
  operator T() const;  // Converts to any type in a braced initializer.
};
template <typename T, std::size_t... indices>
constexpr bool takes(std::index_sequence<indices...>) {
  return requires {
    T{((void)indices, Anything{})...};
  };
}
/// The number of data members of a struct.
template <typename T, std::size_t count = 0>
constexpr std::size_t members_of() {
  if constexpr (takes<T>(std::make_index_sequence<count + 1>{})) {
    return members_of<T, count + 1>();
  } else {
    return count;
  }
}

const void* address(const detail::FieldPointer& field) {
  return std::visit(
      [](auto pointer) -> const void* {
        if constexpr (std::is_same_v<decltype(pointer), detail::NamedField>) {
          return pointer.value;
        } else {
          return pointer;
        }
      },
      field);
}

TEST(ConfigFields, EachIsOfOneRow) {
  Config config;
  std::map<const void*, std::string_view> bound;
  for (const ConfigKey& key : configuration_keys()) {
    if (key.field == nullptr) continue;
    const auto [known, first] = bound.emplace(address(key.field(config)), key.path);
    EXPECT_TRUE(first) << key.path << " and " << known->second << " fill one field";
  }
  // These fields have no key of their own: they follow from several keys, or record the source of a value.
  const std::set<const void*> derived{&config.loss_scaling,    &config.precision_given,
                                      &config.clipping_given,  &config.pipeline_cuts_key,
                                      &config.shard_size_key,  &config.shard_size,
                                      &config.ignored,         &config.notes,
                                      &config.pipeline_begins, &config.offload.host_state_reason};
  for (const void* field : derived) EXPECT_FALSE(bound.contains(field)) << bound[field];
  // Config contains these nine structs, MonitorConfig twice, and fields that are not structs.
  const std::size_t fields =
      members_of<Config>() - 9 + members_of<PrecisionConfig>() + members_of<LossScalerOptions>() +
      members_of<OptimizerConfig>() + members_of<ScheduleConfig>() + members_of<LoraConfig>() +
      members_of<OffloadConfig>() + 2 * members_of<MonitorConfig>() + members_of<DebugConfig>();
  EXPECT_EQ(bound.size() + derived.size(), fields)
      << "a field of Config has neither a row of its own in config/keys_*.cpp nor a place among the derived "
         "ones here";
}

TEST(ConfigFields, DefaultsAreThoseOfConfig) {
  const Json made = Json::parse(Config().to_json()), read = Json::parse(parse_config("{}", 1).to_json());
  std::size_t compared = 0;
  std::set<std::string_view> other_in_table, other_when_read;
  for (const ConfigKey& key : configuration_keys()) {
    std::string pointer = "/" + std::string(key.path);
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const Json::json_pointer place(pointer);
    if (key.field == nullptr || !made.contains(place) || made[place].is_object()) continue;
    ++compared;
    if (Json::accept(key.default_value) && Json::parse(key.default_value) != made[place]) {
      other_in_table.insert(key.path);
    }
    if (read[place] != made[place]) other_when_read.insert(key.path);
  }
  EXPECT_GE(compared, 60U);
  // A file without keys for clipping and precision means no clipping and fp32. The table describes the other
  // two defaults in words.
  EXPECT_THAT(other_in_table,
              ElementsAre("bf16.enabled", "gradient_clipping", "steps_per_print", "tranche.mesh"));
  // validate_config() chooses communication_slab.
  EXPECT_THAT(other_when_read, ElementsAre("bf16.enabled", "communication_data_type", "gradient_clipping",
                                           "tranche.communication_slab"));
}

TEST(ConfigFields, ARangeIsToldWithTheKey) {
  for (const ConfigKey& key : configuration_keys()) {
    if (key.range.wrong.empty()) continue;
    Config config;
    std::visit(
        [](auto field) {
          if constexpr (std::is_arithmetic_v<std::remove_pointer_t<decltype(field)>>) {
            *field = static_cast<std::remove_pointer_t<decltype(field)>>(-3);
          } else {
            FAIL() << "a range of what is no number";
          }
        },
        key.field(config));
    EXPECT_THAT(test::message_of<ConfigurationError>([&] { validate_config(config, 1); }),
                HasSubstr(fmt::format("{}: ", key.path)));
  }
}

}  // namespace
}  // namespace tranche
