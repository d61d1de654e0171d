// tranche checkpoint export.

#include <fmt/format.h>

#include <optional>
#include <ostream>

#include "checkpoint/companions.h"
#include "checkpoint/safetensors.h"
#include "tools/checkpoint/adapters.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/checkpoint/model_files.h"
#include "tools/checkpoint/peft.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// Adds a line about the companions that this export cannot write.
void note_on_files(const checkpoint::Companions& beside, bool settings, const std::string& checkpoint,
                   std::vector<std::string>& notes) {
  if (have_tokenizer(beside)) return;
  const bool lacks_settings =
      settings && checkpoint::find_companion(beside, generation_config_name) == nullptr;
  notes.push_back(
      fmt::format("{} carries no tokenizer{}: checkpoints carry what checkpoint import found beside the "
                  "weights; copy the "
                  "files that transformers is to read into the folder",
                  checkpoint, lacks_settings ? " and no generation settings" : ""));
}

/// Adapters alone are written without their base. The base is verified if it was given or can be found.
void compare_base(checkpoint::Storage storage, const checkpoint::Reader& adapters,
                  const models::LanguageModel& model, const std::string& base,
                  std::vector<std::string>& notes) {
  const auto& record = adapters.manifest().base;
  if (!record) return;
  bool there = true;
  try {
    there = !base.empty() || record->folder.empty() || storage.files.exists(record->folder);
  } catch (const IoError&) {
    there = false;
  }
  if (there) {
    (void)OpenedBase(storage, adapters, model, base, notes);
  } else {
    notes.push_back(
        fmt::format("the base of the adapters is not in {} any more: it was not compared", record->folder));
  }
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
    throw ConfigurationError(fmt::format("{} is for checkpoints with adapters, and {} holds none",
                                         options.peft ? "--peft" : "--base", reader.folder()));
  }
  std::vector<std::string> notes;
  if (!options.base.empty() && !reader.manifest().base)
    notes.push_back(
        fmt::format("the base {} is not read: {} is whole without it", options.base, reader.folder()));
  checkpoint::ExportOptions how;
  how.dtype = export_dtype(options);
  const checkpoint::Companions companions =
      checkpoint::read_companions(detail::posix_file_system(), reader.folder(), reader.manifest());
  how.beside = files_to_export(companions, /*settings=*/!options.peft);
  note_on_files(how.beside, /*settings=*/!options.peft, reader.folder(), notes);
  std::optional<MergedWeights> merged;
  std::vector<checkpoint::ExportTensor> tensors;
  if (options.peft) {
    tensors = peft_tensors(reader);
    how.stem = peft_stem;
    how.config_name = peft_config_name;
    how.config_json = peft_config(*model, lora, companions, notes);
    compare_base(local, reader, *model, options.base, notes);
  } else {
    if (lora.any()) {
      merged.emplace(local, reader, *model, options.base, notes);
      tensors = merged->tensors();
    }
    how.config_json = config_to_export(*model, options.models, companions, how.dtype,
                                       merged && merged->unties_head(), notes);
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
  for (const std::string& note : notes) output.out << "note: " << note << "\n";
  output.out << fmt::format("{}: {} tensors of step {} in {}{} ({})\n", options.to, written.tensors,
                            reader.manifest().run.step, name_of(how.dtype),
                            options.peft ? ", adapters in PEFT's format"
                            : merged     ? ", adapters merged"
                                         : "",
                            progress.summary());
  return 0;
}

}  // namespace tranche::tools
