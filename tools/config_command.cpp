#include "tools/config_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "core/text_file.h"
#include "tools/text_layout.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

using nlohmann::ordered_json;

constexpr std::size_t key_column = 46;

std::string counted_things(std::size_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string verdict(const ConfigCheck& check, const std::string& path) {
  const std::string keys = fmt::format("{} honoured, {} without effect",
                                       counted_things(check.honoured.size(), "key"), check.ignored.size());
  const std::string ranks = counted_things(static_cast<std::size_t>(check.ranks), "rank");
  if (check.accepted()) return fmt::format("{} on {}: accepted: {}\n", path, ranks, keys);
  return fmt::format("{} on {}: refused: {}; {}\n", path, ranks,
                     counted_things(check.refused.size(), "problem"), keys);
}

std::string reason_of(const IgnoredKey& key) {
  if (!key.unknown) return key.reason;
  return key.reason.empty() ? "unknown key" : "unknown key; " + key.reason;
}

std::string lines_of(std::string_view title, const std::vector<std::string>& lines) {
  if (lines.empty()) return {};
  std::string text = fmt::format("{}\n", title);
  for (const std::string& line : lines) text += "  " + wrapped(line, 2, 4) + "\n";
  return text;
}

}  // namespace

std::string config_check_text(const ConfigCheck& check, const std::string& path) {
  std::string text = verdict(check, path) + lines_of("refused", check.refused);
  if (!check.ignored.empty()) text += "no effect\n";
  for (const IgnoredKey& key : check.ignored) text += two_columns(key.key, reason_of(key), key_column);
  if (!check.honoured.empty()) text += "honoured\n";
  for (const ConfigCheck::Honoured& key : check.honoured) {
    text += two_columns(key.key, key.automatic ? key.value + " (\"auto\")" : key.value, key_column);
  }
  return text + lines_of("notes", check.notes);
}

std::string config_check_json(const ConfigCheck& check, const std::string& path) {
  ordered_json honoured = ordered_json::array(), ignored = ordered_json::array();
  for (const ConfigCheck::Honoured& key : check.honoured) {
    honoured.push_back(
        {{"key", key.key}, {"value", ordered_json::parse(key.value)}, {"automatic", key.automatic}});
  }
  for (const IgnoredKey& key : check.ignored) {
    ignored.push_back({{"key", key.key}, {"reason", reason_of(key)}, {"unknown", key.unknown}});
  }
  const ordered_json json = {{"schema", config_check_schema}, {"file", path},
                             {"ranks", check.ranks},          {"accepted", check.accepted()},
                             {"refused", check.refused},      {"no_effect", ignored},
                             {"honoured", honoured},          {"notes", check.notes}};
  // A path, and texts that quote the file, may hold bytes that are not UTF-8.
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

int run_config(const Options& all_options, const Output& output) {
  const ConfigCheckOptions& options = all_options.config_check;
  Launch launch(output.errors, all_options.flags);
  ConfigCheck check;
  const int failed = launch.agree([&] {
    const std::string text =
        detail::read_text_file(options.path, "configuration file", detail::Pipes::allowed);
    check = check_config(text, static_cast<int>(options.ranks), options.set, options.strict,
                         fmt::format("configuration file '{}'", options.path));
  });
  if (failed != 0) return failed;
  if (launch.rank() == 0) {
    output.out << (options.json ? config_check_json(check, options.path)
                                : config_check_text(check, options.path))
               << std::flush;
  }
  return static_cast<int>(check.accepted() ? ExitStatus::success : ExitStatus::configuration);
}

}  // namespace tranche::tools
