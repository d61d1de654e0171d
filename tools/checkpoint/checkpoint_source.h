#pragma once
/// Finds the checkpoint for a path that a user gave, and its model.

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/reader.h"
#include "offload/file_system.h"
#include "tools/train/run_identity.h"
#include "tranche/core/shape.h"

namespace tranche::tools {

/// "a, b, c and 4 more"
std::string some_of(const std::vector<std::string>& names);

/// The checkpoint for a path: itself, or the newest complete one of a run's folder ("x", or its file
/// "x/latest"); `notes` get a line for each that was passed over, and for a better one. Throws
/// CheckpointError.
std::string find_checkpoint(detail::FileSystem& files, const std::string& path,
                            std::vector<std::string>& notes);

/// The identity of a checkpoint's model. `model` (a preset or a config.json, as for --model) replaces the
/// checkpoint's own. Throws CheckpointError when there is neither.
RunIdentity identity_of(const checkpoint::Manifest& manifest, const std::string& path,
                        const std::string& model, const models::ModelRegistry& models);
/// The identity of a model without further information: it is assumed to read bytes if its vocabulary holds
/// 256.
RunIdentity identity_of(std::shared_ptr<const models::LanguageModel> model);

struct NamedShape {
  std::string name;
  Shape shape;
};
struct TensorDifferences {
  std::vector<std::string> missing, extra;  ///< names only in the model, and only in the checkpoint
  std::vector<std::string> shapes;          ///< "wte.weight is [5, 2] and not [4, 2]"
  bool any() const { return !missing.empty() || !extra.empty() || !shapes.empty(); }
  std::string to_string() const;
};
/// Compares names and shapes. Throws CheckpointError for a model with more layers than `found` has tensors.
TensorDifferences compare_tensors(const models::LanguageModel& model, std::string_view model_origin,
                                  const std::vector<NamedShape>& found, std::string_view found_origin);
TensorDifferences compare_tensors(const ModelSpec& spec, const std::vector<NamedShape>& found);
/// Throws CheckpointError, naming both sides, unless `found` are the tensors of the model: it lists missing
/// ones, additional ones, and other shapes.
void require_tensors(const models::LanguageModel& model, std::string_view model_origin,
                     const std::vector<NamedShape>& found, std::string_view found_origin);
void require_tensors(const ModelSpec& spec, std::string_view model_origin,
                     const std::vector<NamedShape>& found, std::string_view found_origin);
/// Also checks adapters; if the checkpoint contains adapters only, the model is not checked.
void require_tensors(const models::LanguageModel& model, std::string_view model_origin,
                     const checkpoint::Reader& reader);

}  // namespace tranche::tools
