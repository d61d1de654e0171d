#include "tranche/device/meta/meta_device.h"

#include <utility>

#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

class MetaStream : public Stream {
 public:
  explicit MetaStream(std::string name) : name_(std::move(name)) {}
  DeviceKind kind() const override { return DeviceKind::meta; }
  const std::string& name() const override { return name_; }
  int threads() const override { return 1; }
  void enqueue(std::string_view, std::function<void()>) override {}
  // Never blocks, but a failure that is already known is not swallowed.
  void wait(const Event& event) override {
    if (event.query()) event.wait();
  }
  Event record() override { return {}; }
  void synchronize() override {}

 private:
  std::string name_;
};

class MetaDevice : public Device {
 public:
  explicit MetaDevice(const DeviceOptions& options)
      : index_(options.index),
        compute_("compute"),
        device_memory_(make_meta_resource(Tier::device)),
        host_memory_(make_meta_resource(Tier::host)) {}

  DeviceKind kind() const override { return DeviceKind::meta; }
  int index() const override { return index_; }
  int threads() const override { return 1; }
  void set_threads(int) override {}
  std::string description() const override { return "meta"; }
  Stream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> create_stream(std::string name) override {
    return std::make_unique<MetaStream>(std::move(name));
  }
  std::unique_ptr<Stream> create_inline_stream(std::string name, int) override {
    return std::make_unique<MetaStream>(std::move(name));
  }
  std::unique_ptr<Stream> create_host_stream(std::string name, int) override {
    return std::make_unique<MetaStream>(std::move(name));
  }
  MemoryResource& memory(Tier tier) override {
    if (tier == Tier::device) return *device_memory_;
    if (tier == Tier::host) return *host_memory_;
    throw InvalidArgument("a device has no memory of tier nvme; the block store of offload/ holds it");
  }
  bool host_accessible() const override { return false; }
  void fill_bytes(Stream&, void*, unsigned char, std::int64_t bytes) override { check(bytes); }
  std::unique_ptr<Replay> create_replay(std::string) override { return std::make_unique<DirectReplay>(); }
  void copy_to_host(Stream&, void*, const void*, std::int64_t bytes) override { check(bytes); }
  void copy_from_host(Stream&, void*, const void*, std::int64_t bytes) override { check(bytes); }

 private:
  static void check(std::int64_t bytes) {
    if (bytes < 0) throw InvalidArgument("copy of " + std::to_string(bytes) + " bytes");
  }

  int index_;
  MetaStream compute_;
  std::unique_ptr<MemoryResource> device_memory_;
  std::unique_ptr<MemoryResource> host_memory_;
};

}  // namespace

std::unique_ptr<Device> make_meta_device(const DeviceOptions& options) {
  return std::make_unique<MetaDevice>(options);
}

}  // namespace tranche
