#include "checkpoint/other_programs.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "../offload/test_folder.h"
#include "checkpoint/folder.h"
#include "checkpoint/safetensors.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class OtherPrograms : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder{fast_folder()};

  void write(const std::string& name, const std::string& content = "0123456789abcdef") {
    const std::string path = folder / name;
    files.create_directories(detail::parent_path(path));
    files.open(path, detail::OpenMode::create_or_truncate)
        ->write(0, content.data(), static_cast<std::int64_t>(content.size()));
  }
  /// The text that an import of the path ends with.
  std::string import(const std::string& name) {
    return message_of<CheckpointError>([&] { SafetensorsFolder(files, folder / name); });
  }
  /// The text that a resume from the path ends with.
  std::string resume(const std::string& name) {
    return message_of<CheckpointError>([&] {
      std::vector<std::string> notes;
      (void)newest_checkpoint(files, folder / name, notes);
    });
  }
};

TEST_F(OtherPrograms, CheckpointsOfOtherProgramsAreNamedAtImportAndResume) {
  const std::string rewrite =
      ": write its weights as safetensors beside a config.json, as save_pretrained() of transformers does, "
      "and import that folder with tranche checkpoint import";
  const std::vector<std::pair<std::string, std::string>> known{
      {"zero_to_fp32.py", "a DeepSpeed checkpoint"},
      {"mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"},
      {"zero_pp_rank_0_mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"},
      {"latest_checkpointed_iteration.txt", "a Megatron checkpoint"},
      {".metadata", "a checkpoint of torch.distributed"}};
  int number = 0;
  for (const auto& [name, program] : known) {
    const std::string at = "of" + std::to_string(number++);
    write(at + "/" + name);
    const std::string what = "; it holds " + name + ", " + program + rewrite;
    EXPECT_THAT(import(at), HasSubstr("neither model.safetensors nor model.safetensors.index.json" + what));
    EXPECT_THAT(resume(at), HasSubstr(what));
  }
  // DeepSpeed's own file `latest` is not a damaged one of ours.
  write("q/zero_to_fp32.py");
  write("q/latest", "global_step500");
  EXPECT_THAT(resume("q"), AllOf(HasSubstr("a DeepSpeed checkpoint"), Not(HasSubstr("damaged"))));
  write("r/latest", "global_step500");
  EXPECT_THAT(resume("r"), HasSubstr("latest is damaged"));
}

TEST_F(OtherPrograms, AFolderThatHoldsTheFolderIsAnsweredWithIt) {
  write("models--a--b/snapshots/12ab/config.json");
  EXPECT_THAT(import("models--a--b"), Not(HasSubstr("; ")));
  write("models--a--b/snapshots/12ab/model.safetensors");
  write("models--a--b/blobs/77");
  EXPECT_THAT(import("models--a--b"),
              HasSubstr("; " + (folder / "models--a--b/snapshots/12ab") + " holds them: give that folder"));
  write("out/checkpoint-500/adapter_config.json");
  write("out/checkpoint-1000/model.safetensors.index.json");
  write("out/training_args.bin");
  EXPECT_THAT(import("out"), HasSubstr("; " + (folder / "out/checkpoint-1000") + " holds them: give that"));
  write("run/step-00000003/manifest.json");
  EXPECT_THAT(import("run"),
              HasSubstr("; it is of this program already: take it with --resume or --resume-weights-only"));
}

TEST_F(OtherPrograms, AFileThatIsNotSafetensorsIsNamedWithItsFormat) {
  write("hf/model.safetensors");
  write("hf/config.json", R"({"model_type": "llama"})");
  EXPECT_THAT(import("hf/config.json"),
              HasSubstr("it is no safetensors file; give the folder, " + (folder / "hf")));
  const std::vector<std::pair<std::string, std::string>> known{
      {"pytorch_model.bin",
       "is in another format: open the model with transformers, whose save_pretrained()"},
      {"tf_model.h5", "is in another format: open the model with transformers, whose save_pretrained()"},
      {"flax_model.msgpack", "is in another format: open the model with transformers"},
      {"adapter_model.bin", "is in PyTorch's format: open the adapters with PEFT, whose save_pretrained()"},
      {"q4.gguf",
       "is in llama.cpp's format: open it with transformers' from_pretrained(FOLDER, "
       "gguf_file=\"q4.gguf\"); save_pretrained() then writes safetensors"},
      {"ckpt.pt", "is in a format that transformers does not open either: write its weights as"},
      {"consolidated.00.pth", "is in a format that transformers does not open either"},
      {"epoch.ckpt", "is in a format that transformers does not open either"},
      {"model_00010.bin", "is in a format that transformers does not open either"}};
  int number = 0;
  for (const auto& [name, what] : known) {
    const std::string at = "with" + std::to_string(number++);
    write(at + "/" + name, "PK");
    EXPECT_THAT(import(at + "/" + name), HasSubstr("it is no safetensors file; " + name + " " + what));
    EXPECT_THAT(import(at), HasSubstr("model.safetensors.index.json; " + name + " " + what));
  }
  // A file without advice has the reason itself.
  write("other/notes.md", "text");
  EXPECT_THAT(import("other/notes.md"), HasSubstr("has 4 bytes: no safetensors file is so short"));
  write("adapter/adapter_model.bin");
  EXPECT_THAT(import("adapter/adapter_model.safetensors"),
              HasSubstr("there is nothing of this name, and nothing is downloaded; adapter_model.bin is in "
                        "PyTorch's format: open the adapters with PEFT"));
}

}  // namespace
}  // namespace tranche::checkpoint
