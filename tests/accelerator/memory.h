// Memory of the devices, and pinned memory of the host.
#pragma once

#include "streams.h"

#include <ATen/ops/from_blob.h>

#include <sys/mman.h>

#include <list>
#include <map>

namespace simulated {

// Allocators are never deleted, since threads use them until the process has ended.
template <typename Allocator>
Allocator& only() {
    static auto* made = new Allocator;
    return *made;
}

// The memory of all devices has two addresses: tensors have the first, which the host cannot use; kernels the second.
constexpr size_t kBytes = size_t(4) << 30;  // of one device
char* map_memory(int protection) {
    static const int file = memfd_create("simulated accelerator", MFD_CLOEXEC);
    int failed = ftruncate(file, kDevices * kBytes);
    void* mapped = mmap(nullptr, kDevices * kBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(!failed && mapped != MAP_FAILED, "no memory for the simulated accelerator");
    return static_cast<char*>(mapped);
}
char* const address_for_tensors = map_memory(PROT_NONE);
char* const address_for_kernels = map_memory(PROT_READ | PROT_WRITE);

char* kernel_address(const void* address) {
    return address_for_kernels + (static_cast<const char*>(address) - address_for_tensors);
}

// Memory belongs to the stream on which it was allocated. Once it is freed, that stream uses it again at once, unless
// record_stream has named other streams: then when these have done what they had to do. As CUDA's.
class DeviceAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        Device device(kType, current_device);
        if (bytes == 0) return {nullptr, device};
        Block* block = take((bytes + 511) / 512 * 512, current_stream(current_device));
        // Whoever still uses the memory, or reads it before writing to it, finds NaN.
        queue_of(block->stream).push([block] { memset(kernel_address(block->start), 0xFF, block->bytes); });
        return {block->start, block, free, device};
    }

    void record(const c10::DataPtr& data, const Stream& stream) {
        std::lock_guard lock(mutex_);
        Block* block = data.cast_context<Block>(free);  // nullptr for memory of others
        if (block != nullptr && stream != block->stream) block->other_streams.insert(stream);
    }

    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "torch does not call it"); }

  private:
    struct Block {
        char* const start;
        const size_t bytes;
        const Stream stream;
        std::unordered_set<Stream> other_streams;
        std::vector<Moment> last_uses;
    };

    Block* take(size_t bytes, const Stream& stream) {
        std::lock_guard lock(mutex_);
        for (auto place = freed_.begin(); place != freed_.end(); ++place) {
            Block* block = *place;
            bool is_done = std::all_of(block->last_uses.begin(), block->last_uses.end(), is_over);
            if (!is_done || block->bytes != bytes || block->stream != stream) continue;
            freed_.erase(place);
            block->other_streams.clear();
            block->last_uses.clear();
            return block;
        }
        size_t start = std::exchange(ends_[stream.device_index()], ends_[stream.device_index()] + bytes);
        TORCH_CHECK_WITH(OutOfMemoryError, start + bytes <= kBytes, "the simulated device has no memory left");
        return new Block{address_for_tensors + stream.device_index() * kBytes + start, bytes, stream};
    }

    static void free(void* context) {
        auto block = static_cast<Block*>(context);
        auto& own = only<DeviceAllocator>();
        std::lock_guard lock(own.mutex_);
        for (const Stream& other : block->other_streams) block->last_uses.push_back(queue_of(other).moment());
        own.freed_.push_front(block);
    }

    std::mutex mutex_;
    std::list<Block*> freed_;
    std::array<size_t, kDevices> ends_{};  // of what was ever used
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
    only<DeviceAllocator>().record(data, stream);
}

// Memory of the host that copies use without waiting.
class PinnedAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        void* start = malloc(bytes + 1);  // not nullptr, even for none
        std::lock_guard lock(mutex_);
        ends_[start] = static_cast<char*>(start) + bytes;
        return {start, start, free, c10::DeviceType::CPU};
    }

    bool contains(const void* address) {
        std::lock_guard lock(mutex_);
        auto next = ends_.upper_bound(address);
        return next != ends_.begin() && address <= std::prev(next)->second;
    }

    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "torch does not call it"); }

  private:
    static void free(void* start) {
        auto& own = only<PinnedAllocator>();
        std::lock_guard lock(own.mutex_);
        own.ends_.erase(start);
        ::free(start);
    }

    std::mutex mutex_;
    std::map<const void*, const void*> ends_;
};

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// What kernels use in place of a tensor on the device: one of the CPU in the same memory, which it does not keep.
at::Tensor for_kernels(const at::Tensor& tensor) {
    if (!is_on_device(tensor)) return tensor;
    void* start = tensor.numel() == 0 ? nullptr : kernel_address(tensor.const_data_ptr());
    auto made = at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
}

// Options and numbers.
template <typename T>
T for_kernels(const T& value) {
    return value;
}

template <typename T>
std::vector<T> for_kernels(const std::vector<T>& values) {
    std::vector<T> made;
    for (const T& value : values) made.push_back(for_kernels(value));
    return made;
}

}  // namespace simulated
