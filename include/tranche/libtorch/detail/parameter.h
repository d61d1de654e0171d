#pragma once
/// A parameter of a module, whose memory is the engine's while its unit is gathered.

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tranche::libtorch::detail {

/// LibTorch from 2.3 on can refuse reads of a storage that has no memory now, with a text of ours, and later
/// versions can stop refusing them. Before 2.3 a closed parameter is null.
template <class Storage>
inline constexpr bool can_refuse = requires(Storage& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
};
template <class Storage>
inline constexpr bool can_allow = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};
inline constexpr bool names_closed_parameters = can_refuse<c10::StorageImpl>;
inline constexpr bool names_closed_views = can_allow<c10::StorageImpl>;

template <class Storage>
void refuse_reads(Storage& storage, const std::string& text) {
  if constexpr (can_refuse<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}
template <class Storage>
void allow_reads(Storage& storage) {
  if constexpr (can_allow<Storage>) storage.clear_data_ptr_access_error_msg_();
}

/// A storage of that size without memory.
inline c10::intrusive_ptr<c10::StorageImpl> null_storage(std::int64_t bytes, at::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false);
}

struct Parameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases = {};
  /// The tensor's while its unit is gathered. One for good, whatever memory it has: autograd saves parameters
  /// and views of them; views share it and so see the memory of each gather, wherever that lies.
  c10::intrusive_ptr<c10::StorageImpl> storage = {};
  /// The tensor's between gathers, which refuses reads for good: not every LibTorch can read a storage again
  /// that has refused. Where it can, `storage` refuses too, and with it the views that a graph saved.
  c10::intrusive_ptr<c10::StorageImpl> closed = {};

  /// Frees the parameter's own memory; it is closed then.
  void adopt(at::ScalarType type, at::Device device) {
    const auto bytes = tensor.numel() * static_cast<std::int64_t>(c10::elementSize(type));
    storage = null_storage(bytes, device);
    closed = null_storage(bytes, device);
    refuse_reads(*closed, refusal());
    tensor.set_data(at::empty({0}, at::TensorOptions().dtype(type).device(device))
                        .set_(c10::Storage(storage), 0, tensor.sizes(), {}));
    close();
  }
  /// Gives it the memory of a gather.
  void open(void* data) {
    storage->set_data_ptr_noswap({data, storage->device()});
    allow_reads(*storage);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(storage));
  }
  void close() noexcept {
    storage->set_data_ptr_noswap({nullptr, storage->device()});
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(closed));
    if constexpr (names_closed_views) {
      try {
        refuse_reads(*storage, refusal());
      } catch (...) {  // no memory for the text: the view is null
      }
    }
  }

 private:
  std::string refusal() const {
    return "parameter " + name +
           " is used while its unit is not gathered: use it inside a call of its Unit<>, or in Unit::with()";
  }
};

}  // namespace tranche::libtorch::detail
