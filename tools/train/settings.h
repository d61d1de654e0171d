#pragma once
/// Turns flags and files into the settings of a run.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/arguments.h"
#include "tools/train/run_identity.h"
#include "tranche/config/config.h"
#include "tranche/models/language_model.h"
#include "tranche/training/sampler.h"

namespace tranche::tools {

/// The flags as overrides of configuration keys, in the order in which they apply, which is that of the
/// command line.
/// `config_text` is the file's (it may use older names of keys).
std::vector<std::string> overrides_of(const Options& options, const std::string& config_text);

/// The held-out tokens of a validation in `train` if neither --eval-batches nor --ngrams is given: all of
/// them may take longer than the training.
inline constexpr std::int64_t default_validation_tokens = std::int64_t{1} << 17;

/// The configuration if there is no --config: bf16, clipping at 1.0, AdamW. An empty file given with --config
/// is fp32 without clipping, as in DeepSpeed.
std::string default_configuration(const Options& options);

/// The configuration of --config with the overrides, for `ranks`. Throws ConfigurationError.
Config read_config(const Options& options, int ranks);

struct Settings {
  Config config;
  std::shared_ptr<const models::LanguageModel> model;
  std::int64_t sequence = 0;
  std::int64_t steps = 0;
  training::BatchShape batch;
};

/// The default sequence length; shorter if the model has fewer positions.
inline constexpr std::int64_t default_sequence = 1024;
/// The sequence length: `asked`, else the default, with a note if the model has positions for more. Throws
/// ConfigurationError for more than it has.
std::int64_t sequence_of(std::optional<std::int64_t> asked, const models::LanguageModel& model,
                         std::vector<std::string>& notes);

/// A line for each key of a model's config.json that seems to be misspelt; none where `path` is a preset.
std::vector<std::string> notes_on_model(const std::string& path, const models::LanguageModel& model);

/// Throws ConfigurationError for inconsistent settings.
Settings resolve_settings(const Options& options, int ranks);

/// Held-out windows that are evaluated together.
struct ValidationSet {
  std::string name;  ///< empty: the only set, without a name
  std::unique_ptr<training::Windows> windows;
  std::vector<std::int64_t> numbers;  ///< of the windows in use
  /// The set's name as a key, which checkpoints need.
  std::string key() const { return name.empty() ? "validation" : name; }
  /// A digest of the files' bytes and of the windows in use.
  std::uint64_t digest() const;
};

/// Training and held-out windows.
struct Data {
  std::vector<std::unique_ptr<training::TokenFile>> training_files,
      validation_files;  ///< the second is empty if the tails of the first are held out
  std::unique_ptr<training::Windows> training;  ///< empty in `evaluate` without --data
  std::vector<ValidationSet> validation;        ///< at least one
  std::unique_ptr<training::Mixture> mixture;   ///< of the training windows; nullptr without any
  std::vector<std::string> notes;               ///< for the table at the start
  /// All files, those to train on first.
  std::vector<const training::TokenFile*> files() const {
    std::vector<const training::TokenFile*> all;
    for (const auto* part : {&training_files, &validation_files}) {
      for (const auto& file : *part) all.push_back(file.get());
    }
    return all;
  }
  bool has_documents() const {
    const auto some = [](const auto& files) {
      return std::any_of(files.begin(), files.end(),
                         [](const auto& file) { return !file->document_ends().empty(); });
    };
    return some(training_files) || some(validation_files);
  }
  std::int64_t held_out_windows() const {
    std::int64_t count = 0;
    for (const ValidationSet& set : validation) count += set.windows->count();
    return count;
  }
  /// Every token is a byte.
  bool bytes() const {
    const auto all = files();
    return std::all_of(all.begin(), all.end(), [](const auto* file) { return file->width() == 1; });
  }
  /// The files to train on, or to evaluate where there are none, are text.
  bool text() const {
    const auto& all = training_files.empty() ? validation_files : training_files;
    return std::all_of(all.begin(), all.end(),
                       [](const auto& file) { return file->format() == training::DataFormat::text; });
  }
};

/// Opens the data and checks it against the model: format, length, vocabulary, and that there is something to
/// learn and to evaluate. Files of tokens of up to 1 GiB are checked at once; of larger ones the first GiB
/// (the rest when it is read). Throws ConfigurationError.
Data open_data(const Options& options, const Settings& settings);

/// "3 of 51 documents are longer than a sequence ..."; empty if none is, or no file has document boundaries.
std::string note_on_long_documents(const Data& data, std::int64_t sequence);

/// "3 of 51 documents (6 %) are cut by the end of a window ..."; empty if none is, or no file to train on has
/// tokens that are not learned.
std::string note_on_cut_documents(const training::Windows& training);

/// The description of this run for its checkpoints.
RunIdentity identity_of(const Options& options, const Settings& settings, const Data& data);

}  // namespace tranche::tools
