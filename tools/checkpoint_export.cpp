// tranche checkpoint export.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "checkpoint/safetensors.h"
#include "tools/adapters.h"
#include "tools/checkpoint_command.h"
#include "tools/checkpoint_source.h"
#include "tools/peft.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// The model's config.json with what transformers should know besides.
std::string config_text(const models::LanguageModel& model, DataType dtype, bool unties_head) {
  auto json = nlohmann::json::parse(model.to_json());
  json["torch_dtype"] = dtype == DataType::float32 ? "float32" : "bfloat16";
  if (unties_head) json["tie_word_embeddings"] = false;
  return json.dump(2) + "\n";
}

}  // namespace

int checkpoint_export(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  checkpoint::Reader reader(local, chosen_checkpoint(detail::posix_file_system(), options.path, output));
  const std::shared_ptr<const models::LanguageModel> model =
      identity_of(reader.manifest(), reader.folder(), options.model, options.models).model;
  require_tensors(*model, options.model.empty() ? "its own 'user'" : "--model " + options.model, reader);
  const LoraConfig lora = adapters_of(reader.manifest());
  if (!lora.any() && (options.peft || !options.base.empty())) {
    throw ConfigurationError(fmt::format("{} is of checkpoints with adapters, and {} holds none",
                                         options.peft ? "--peft" : "--base", reader.folder()));
  }
  checkpoint::ExportOptions how;
  how.dtype = options.dtype == "bf16" ? DataType::bfloat16 : DataType::float32;
  std::optional<MergedWeights> merged;
  std::vector<checkpoint::ExportTensor> tensors;
  if (options.peft) {
    tensors = peft_tensors(reader);
    how.stem = peft_stem;
    how.config_name = peft_config_name;
    how.config_json = peft_config(*model, lora);
  } else {
    if (lora.any()) {
      merged.emplace(local, reader, *model, options.base);
      tensors = merged->tensors();
    }
    how.config_json = config_text(*model, how.dtype, merged && merged->unties_head());
  }
  std::int64_t elements = model->spec(model->shape().positions).parameters();
  if (!tensors.empty()) {
    elements = 0;
    for (const checkpoint::ExportTensor& tensor : tensors) elements += tensor.shape.elements();
  }
  TransferProgress progress("exported", elements * size_of(how.dtype), output.terminal,
                            [&](std::string_view text) { draw(output.out, text); });
  how.progress = [&](std::int64_t bytes) { progress.add(bytes); };
  const checkpoint::ExportSummary written =
      tensors.empty() ? checkpoint::export_safetensors(reader, local, options.to, how)
                      : checkpoint::export_safetensors(tensors, reader.folder(), local, options.to, how);
  progress.finish();
  output.out << fmt::format("{}: {} tensors of step {} in {}{} ({})\n", options.to, written.tensors,
                            reader.manifest().run.step, options.dtype,
                            options.peft ? ", adapters in PEFT's format"
                            : merged     ? ", adapters merged"
                                         : "",
                            progress.summary());
  return 0;
}

}  // namespace tranche::tools
