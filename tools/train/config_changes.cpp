#include "tools/train/config_changes.h"

#include <fmt/format.h>

#include <utility>

#include "config/changes.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using detail::ChangedValue;

namespace {

std::vector<ChangedValue> model_differences(const RunIdentity& saved, const RunIdentity& present) {
  return detail::changed_values(saved.model->to_json(), present.model->to_json());
}

/// True for a key that matters only when weights are drawn (initializer_range) or only to a tokenizer.
bool is_of_the_beginning(std::string_view key) {
  return key == "initializer_range" || is_token_id(key);
}

}  // namespace

bool is_token_id(std::string_view key) {
  return key.ends_with("_token_id");
}

bool is_adjustable(std::string_view key) {
  for (const std::string_view end : {"dropout", "pdrop", "epsilon", "eps"}) {
    if (key.ends_with(end)) return true;
  }
  return false;
}

std::vector<std::string> adjusted_model(const RunIdentity& saved, const RunIdentity& present) {
  std::vector<std::string> lines;
  if (saved.model->architecture() != present.model->architecture()) return lines;  // their keys differ
  for (const ChangedValue& difference : model_differences(saved, present)) {
    if (is_adjustable(difference.key)) {
      lines.push_back("the model's " + difference.line());
    }
  }
  return lines;
}

std::vector<std::string> identity_changes(const RunIdentity& saved, const RunIdentity& present) {
  std::vector<std::string> lines = adjusted_model(saved, present);
  const auto compare = [&](const std::string& what, const auto& is, const auto& was) {
    if (is != was) lines.push_back(fmt::format("{} is {}, was {}", what, is, was));
  };
  compare("--sequence", present.sequence, saved.sequence);
  if (!saved.data.empty()) compare("--data", "'" + present.data + "'", "'" + saved.data + "'");
  if (saved.training_windows > 0 && present.sequence == saved.sequence) {
    // A different number of windows changes the order of samples, and may move some between the two parts.
    compare("the number of training windows", present.training_windows, saved.training_windows);
    compare("the number of held-out windows", present.held_out_windows, saved.held_out_windows);
  }
  if (!saved.data_digest.empty()) {
    const auto known = [](const std::string& digest) { return digest.empty() ? "none" : digest; };
    compare("the digest of --data", present.data_digest, saved.data_digest);
    compare("the digest of --validation-data", known(present.validation_digest),
            known(saved.validation_digest));
  }
  return lines;
}

std::vector<std::string> model_changes(const RunIdentity& saved, const RunIdentity& present) {
  std::vector<std::string> lines;
  const std::string was = saved.model->architecture(), is = present.model->architecture();
  if (was != is) {  // their keys differ too
    lines.push_back(fmt::format("the model is a {}, was a {}", is, was));
    return lines;
  }
  for (const ChangedValue& difference : model_differences(saved, present)) {
    if (is_adjustable(difference.key) || is_of_the_beginning(difference.key)) continue;
    lines.push_back("the model's " + difference.line());
  }
  return lines;
}

void require_same_model(const RunIdentity& saved, const RunIdentity& present, std::string_view checkpoint) {
  std::string text;
  const std::string was = saved.model->architecture(), is = present.model->architecture();
  if (was != is) text = fmt::format("it is a {} there, a {} here", was, is);
  for (const ChangedValue& difference : model_differences(saved, present)) {
    if (was != is) break;  // their keys differ too
    if (is_adjustable(difference.key) || is_of_the_beginning(difference.key)) continue;
    text += fmt::format("{}{} is {} there, {} here", text.empty() ? "" : ", ", difference.key, difference.was,
                        difference.is);
  }
  if (text.empty()) return;
  throw CheckpointError(
      fmt::format("{} is of another model than --model gives: {}; give its own --model, take what both "
                  "have with --partial, or start a run of this one without the checkpoint",
                  checkpoint, text));
}

void require_same_tokenizer(const RunIdentity& saved, const RunIdentity& present,
                            std::string_view checkpoint) {
  if (saved.tokenizer == present.tokenizer) return;
  throw CheckpointError(
      fmt::format("{} was trained on {}, but --data holds {}: the same numbers would mean other text; give "
                  "data of its kind, or take over only its weights with --resume-weights-only",
                  checkpoint, describe(saved.tokenizer), describe(present.tokenizer)));
}

}  // namespace tranche::tools
