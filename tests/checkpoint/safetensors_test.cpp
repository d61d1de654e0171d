#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../offload/test_folder.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class SafetensorsTest : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};

  void write(const std::string& name, const std::string& content) {
    const std::string path = folder / name;
    files.create_directories(detail::parent_path(path));
    files.open(path, detail::OpenMode::create_or_truncate)
        ->write(0, content.data(), static_cast<std::int64_t>(content.size()));
  }
  static std::string file_of(const std::string& header, const std::string& data) {
    std::string text(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(header.size() >> (8 * i) & 255);
    return text + header + data;
  }
  std::string refusal(const std::string& content) {
    write("bad/model.safetensors", content);
    return message_of<CheckpointError>([&] { SafetensorsFolder(files, folder / "bad"); });
  }
};

TEST_F(SafetensorsTest, WhatIsExportedIsImported) {
  Reader reader(storage, save_sample(storage, folder / "run", sample_layout(3), 1));
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const std::int64_t largest : {std::int64_t{5'000'000'000}, std::int64_t{3000}}) {
      const std::string target = folder / (std::string(name_of(dtype)) + std::to_string(largest));
      ExportOptions options;
      options.dtype = dtype;
      options.largest_file = largest;
      options.config_json = "{}\n";
      options.rename = [](const std::string& name) { return name == "f.b" ? "" : "transformer." + name; };
      const ExportSummary summary = export_safetensors(reader, storage, target, options);
      EXPECT_EQ(summary.tensors, 8);
      EXPECT_EQ(summary.files.back(), "config.json");
      EXPECT_EQ(summary.files.front(), largest > 3000               ? "model.safetensors"
                                       : dtype == DataType::float32 ? "model-00001-of-00005.safetensors"
                                                                    : "model-00001-of-00003.safetensors");
      if (summary.files.size() > 2) {  // the index is sorted over all files, like that of transformers
        const auto index =
            nlohmann::ordered_json::parse(files.read_file(target + "/model.safetensors.index.json"));
        std::vector<std::string> names;
        for (const auto& [name, file] : index["weight_map"].items()) names.push_back(name);
        EXPECT_EQ(names.size(), 8u);
        EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
      }
      const SafetensorsFolder back(files, target);
      EXPECT_EQ(back.config(), "{}\n");
      EXPECT_EQ(back.tensors().size(), 8u);
      EXPECT_EQ(back.find("transformer.f.b"), nullptr);
      for (const StoredTensor& tensor : reader.tensors()) {
        if (tensor.name == "f.b") continue;
        const SafeTensor* found = back.find("transformer." + tensor.name);
        ASSERT_NE(found, nullptr) << tensor.name;
        const auto extents = tensor.shape.extents();
        EXPECT_EQ(found->shape, std::vector<std::int64_t>(extents.begin(), extents.end()));
        std::vector<float> values(static_cast<std::size_t>(tensor.shape.elements()));
        std::vector<float> expected(values.size());
        back.read(*found, {0, tensor.shape.elements()}, DataType::float32, values.data());
        reader.read_tensor(tensor.name, "weight", {0, tensor.shape.elements()}, DataType::float32,
                           expected.data());
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (dtype == DataType::bfloat16) expected[i] = to_float(to_bfloat16(expected[i]));
          ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected[i]))
              << tensor.name;
        }
      }
      EXPECT_THAT(
          message_of<CheckpointError>([&] { export_safetensors(reader, storage, target, options); }),
          AllOf(StartsWith("cannot export"), HasSubstr("holds model"), HasSubstr("name an empty folder")));
    }
  }
  ExportOptions options;
  options.dtype = DataType::float16;
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { export_safetensors(reader, storage, folder / "x", options); }),
      HasSubstr("export in fp16"));
  options.dtype = DataType::float32;
  options.rename = [](const std::string&) { return "same"; };
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { export_safetensors(reader, storage, folder / "x", options); }),
      HasSubstr("two tensors are exported as 'same'"));
}

TEST_F(SafetensorsTest, AFailureLeavesNoFileInParts) {
  const auto read = [](detail::ElementRange elements, DataType, void*) {
    if (elements.begin > 0) throw CheckpointError("the weights end here");
  };
  const std::vector<ExportTensor> tensors{{"a", Shape{3 << 20}, read}};
  ExportOptions options;
  options.config_json = "{}";
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { export_safetensors(tensors, "this", storage, folder / "out", options); }),
              HasSubstr("cannot export this to " + (folder / "out") + ": the weights end here"));
  EXPECT_TRUE(files.list(folder / "out").empty());
}

TEST_F(SafetensorsTest, SmallFilesAreWrittenBesideAndReplaceNothing) {
  const std::vector<ExportTensor> none;
  ExportOptions options;
  options.config_json = "{}";
  options.beside = {{"merges.txt", "a b"}, {"vocab.json", "{}"}};
  write("out/merges.txt", "a b");
  const ExportSummary summary = export_safetensors(none, "this", storage, folder / "out", options);
  EXPECT_THAT(summary.files, ElementsAre("model.safetensors", "merges.txt", "vocab.json", "config.json"));
  EXPECT_EQ(files.read_file(folder / "out/vocab.json"), "{}");
  for (const char* name : {"merges.txt", "config.json"}) {
    write(std::string("mine-") + name + "/" + name, "mine");
    EXPECT_THAT(
        message_of<CheckpointError>([&] {
          export_safetensors(none, "this", storage, folder / (std::string("mine-") + name), options);
        }),
        HasSubstr(std::string("it holds ") + name + " already, with other contents: name an empty folder"));
  }
}

TEST_F(SafetensorsTest, ReadsWhatOthersWrite) {
  // The header has fp16 values 1.5 and -2, an integer tensor that is only listed, and a scalar.
  const std::string header =
      R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},"a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]},)"
      R"("s":{"dtype":"BF16","shape":[],"data_offsets":[12,14]}}   )";
  write("one.safetensors", file_of(header, std::string("\x00\x3e\x00\xc0", 4) + std::string(8, '\1') +
                                               std::string("\x80\x3f", 2)));
  const SafetensorsFolder one(files, folder / "one.safetensors");
  float values[2] = {};
  one.read(*one.find("a"), {0, 2}, DataType::float32, values);
  EXPECT_THAT(values, ElementsAre(1.5f, -2.0f));
  one.read(*one.find("s"), {0, 1}, DataType::float32, values);
  EXPECT_EQ(values[0], 1.0f);
  EXPECT_EQ(one.config(), "");
  EXPECT_THAT(message_of<CheckpointError>([&] {
                one.read(*one.find("b"), {0, 1}, DataType::float32, values);
              }),
              HasSubstr("cannot import tensor b of"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                one.read(*one.find("a"), {0, 3}, DataType::float32, values);
              }),
              HasSubstr("elements 0 to 3 of tensor a, which has 2"));
}

TEST_F(SafetensorsTest, SaysWhatIsWrongWithAFile) {
  const auto entry = [](const std::string& dtype, const std::string& shape, int begin, int end) {
    return "{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(begin) +
           "," + std::to_string(end) + "]}";
  };
  const std::string four = std::string(4, '\0');
  const std::string good = "{\"a\":" + entry("\"F32\"", "[1]", 0, 4) + "}";
  EXPECT_EQ(refusal(file_of(good, four)), "nothing was thrown");
  EXPECT_THAT(refusal("short"), HasSubstr("has 5 bytes: no safetensors file is so short"));
  EXPECT_THAT(refusal(std::string(8, '\x7f') + "{}"), HasSubstr("its header claims"));
  EXPECT_THAT(refusal(file_of(good, four).substr(0, 20)), HasSubstr("truncated or no safetensors file"));
  EXPECT_THAT(refusal(file_of("{\"a\":", "")),
              HasSubstr("(header) is not JSON: line 1, column 6: syntax error"));
  EXPECT_THAT(refusal(file_of("[]", "")), HasSubstr("(header) is not an object: a list of 0"));
  EXPECT_THAT(refusal(file_of(good, "")),
              HasSubstr("need 4 bytes of data, the file holds 0: it is truncated"));
  EXPECT_THAT(refusal(file_of(good, four + "x")), HasSubstr("the file holds 5: it is too long"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + entry("\"F33\"", "[1]", 0, 4) + "}", four)),
              HasSubstr("a.dtype is 'F33', which is not known"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + entry("\"F32\"", "[2]", 0, 4) + "}", four)),
              HasSubstr("a.data_offsets hold 4 bytes, but its shape holds 2 elements of F32"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + entry("\"F32\"", "[-1]", 0, 4) + "}", four)),
              HasSubstr("negative extent"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + entry("\"F32\"", "[4611686018427387904,4]", 0, 4) + "}", four)),
              HasSubstr("more elements than can be"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + entry("\"F32\"", "[1]", 4, 0) + "}", four)),
              HasSubstr("a.data_offsets are not a beginning and an end"));
  EXPECT_THAT(refusal(file_of("{\"a\":{\"dtype\":\"F32\"}}", four)), HasSubstr("a.shape is missing"));
  const std::string two = entry("\"F32\"", "[1]", 0, 4);
  EXPECT_THAT(refusal(file_of("{\"a\":" + two + ",\"b\":" + two + "}", four)),
              HasSubstr("tensors a and b overlap"));
  EXPECT_THAT(refusal(file_of("{\"a\":" + two + ",\"b\":" + entry("\"U8\"", "[1]", 5, 6) + "}", four + "xx")),
              HasSubstr("bytes 4 to 4 of the data, between a and b, belong to no tensor"));
}

TEST_F(SafetensorsTest, SaysWhatIsWrongWithAFolder) {
  const auto refused = [&](const char* name) {
    return message_of<CheckpointError>([&] { SafetensorsFolder(files, folder / name); });
  };
  EXPECT_THAT(refused("none"), HasSubstr("there is nothing of this name, and nothing is downloaded"));
  write("empty/config.json", "{}");
  EXPECT_THAT(refused("empty"), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  write("empty/rust_model.ot", "");
  write("empty/pytorch_model.bin", "PK");
  EXPECT_THAT(refused("empty"),
              HasSubstr("model.safetensors.index.json; pytorch_model.bin is in another format: open "
                        "the model with transformers, whose save_pretrained() writes safetensors"));
  write("empty/model-00001-of-00002.safetensors", "");
  EXPECT_THAT(
      refused("empty"),
      HasSubstr(
          "index.json; model-00001-of-00002.safetensors is there, but not the index that lists such files"));
  const std::string one = file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x");
  write("index/m1.safetensors", one);
  write("index/m2.safetensors", one);
  write("index/model.safetensors.index.json", R"({"weight_map":{"a":"../m1.safetensors"}})");
  EXPECT_THAT(refused("index"), HasSubstr("weight_map.a is not the name of a file beside it"));
  write("index/model.safetensors.index.json",
        R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors"}})");
  EXPECT_THAT(refused("index"), HasSubstr("tensor b is not in m1.safetensors"));
  write("index/model.safetensors.index.json",
        R"({"weight_map":{"a":"m1.safetensors","b":"m2.safetensors"}})");
  EXPECT_THAT(refused("index"), HasSubstr("tensor a is in another file too"));
  write("index/model.safetensors.index.json", R"({"weight_map":{"a":"m2.safetensors"}})");
  EXPECT_THAT(SafetensorsFolder(files, folder / "index").files_read(), ElementsAre("m2.safetensors"));
  write("index/model.safetensors.index.json", R"({"weight_map":{"a":"m3.safetensors"}})");
  EXPECT_THAT(refused("index"), HasSubstr("m3.safetensors"));
  std::string many;
  for (int file = 0; file < 60'000; ++file)
    many += (file == 0 ? "" : ",") + ("\"t" + std::to_string(file) + "\":\"f" + std::to_string(file) + "\"");
  write("index/model.safetensors.index.json", "{\"weight_map\":{" + many + "}}");
  EXPECT_THAT(refused("index"),
              HasSubstr("weight_map.t4096 is one file too many: an index may name at most 4096 files"));
  write("index/model.safetensors.index.json", "{}");
  EXPECT_THAT(refused("index"), HasSubstr("weight_map is missing"));
}

}  // namespace
}  // namespace tranche::checkpoint
