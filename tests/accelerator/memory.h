// Memory of the devices, and pinned memory of the host.
#pragma once

#include "streams.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <tuple>

namespace simulated {

// The memory of a device, at two addresses: tensors have the one that the host cannot use, kernels use the other.
class AddressSpace {
  public:
    static constexpr size_t kBytes = size_t(4) << 30;

    AddressSpace() {
        int file = memfd_create("simulated accelerator", 0);
        TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "no memory for the simulated accelerator");
        for_tensors_ = map(file, PROT_NONE);
        for_kernels_ = map(file, PROT_READ | PROT_WRITE);
        close(file);
    }

    char* at(size_t offset) const { return for_tensors_ + offset; }
    char* for_kernels(const void* address) const { return for_kernels_ + (as_bytes(address) - for_tensors_); }
    bool contains(const void* address) const {
        return as_bytes(address) >= for_tensors_ && as_bytes(address) < for_tensors_ + kBytes;
    }

  private:
    static const char* as_bytes(const void* address) { return static_cast<const char*>(address); }

    static char* map(int file, int protection) {
        void* mapped = mmap(nullptr, kBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(mapped != MAP_FAILED, "no addresses for the simulated accelerator");
        return static_cast<char*>(mapped);
    }

    char* for_tensors_;
    char* for_kernels_;
};

inline AddressSpace& memory_of(DeviceIndex device) {
    static auto* all = new std::array<AddressSpace, kDevices>;
    return all->at(device);
}

// As CUDA's caching allocator: memory belongs to the stream on which it was allocated, and is used again there at once
// when it is freed, unless record_stream named other streams. It is overwritten when it is allocated again.
class DeviceAllocator final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        Device device(kType, current_device);
        if (bytes == 0) {
            return {nullptr, nullptr, [](void*) {}, device};
        }
        Place place{current_stream(current_device), (bytes + kRounding - 1) / kRounding * kRounding};
        std::lock_guard lock(mutex_);
        free_what_is_done();
        char* address = take(place);
        char* start = memory_of(current_device).for_kernels(address);
        queue_of(place.stream).push([start, size = place.bytes] { memset(start, 0xFF, size); });
        used_.emplace(address, Block{place});
        return {address, address, raw_deleter(), device};
    }

    void recordStream(const c10::DataPtr& memory, Stream stream) override {
        std::lock_guard lock(mutex_);
        auto found = used_.find(memory.get());
        if (found != used_.end() && stream != found->second.place.stream) {
            found->second.other_streams.insert(stream.id());
        }
    }

    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "never called"); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
    void resetAccumulatedStats(DeviceIndex) override {}
    void resetPeakStats(DeviceIndex) override {}

  private:
    static constexpr size_t kRounding = 512;

    struct Place {
        Stream stream;
        size_t bytes;

        auto key() const { return std::tuple(stream.device_index(), stream.id(), bytes); }
        bool operator<(const Place& other) const { return key() < other.key(); }
    };

    struct Block {
        Place place;
        std::set<c10::StreamId> other_streams;
        std::vector<Moment> last_uses;
    };

    char* take(const Place& place) {
        auto& unused = unused_[place];
        if (!unused.empty()) {
            char* address = unused.back();
            unused.pop_back();
            return address;
        }
        size_t& end = ends_[current_device];
        TORCH_CHECK_WITH(OutOfMemoryError, end + place.bytes <= AddressSpace::kBytes, "no memory is left");
        end += place.bytes;
        return memory_of(current_device).at(end - place.bytes);
    }

    void free(void* address) {
        std::lock_guard lock(mutex_);
        auto node = used_.extract(address);
        Block& block = node.mapped();
        for (c10::StreamId id : block.other_streams) {
            Stream other(Stream::UNSAFE, block.place.stream.device(), id);
            block.last_uses.push_back(queue_of(other).moment());
        }
        freed_.insert(std::move(node));
    }

    void free_what_is_done() {
        for (auto next = freed_.begin(); next != freed_.end();) {
            auto& [address, block] = *next;
            bool is_done = std::all_of(block.last_uses.begin(), block.last_uses.end(), is_over);
            if (is_done) {
                unused_[block.place].push_back(static_cast<char*>(address));
            }
            next = is_done ? freed_.erase(next) : std::next(next);
        }
    }

    std::mutex mutex_;
    std::map<void*, Block> used_;
    std::map<void*, Block> freed_;
    std::map<Place, std::vector<char*>> unused_;
    std::array<size_t, kDevices> ends_{};
};

inline DeviceAllocator& device_allocator() {
    static auto* allocator = new DeviceAllocator;
    return *allocator;
}

inline c10::DeleterFnPtr DeviceAllocator::raw_deleter() const {
    return [](void* address) { device_allocator().free(address); };
}

inline void Guard::recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const {
    device_allocator().recordStream(memory, stream);
}

// Memory of the host from which, and to which, copies do not wait.
class PinnedAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        bytes = std::max<size_t>(bytes, 1);
        auto address = static_cast<char*>(malloc(bytes));
        std::lock_guard lock(mutex_);
        sizes_[address] = bytes;
        return {address, address, raw_deleter(), c10::DeviceType::CPU};
    }

    bool contains(const void* address) {
        auto byte = static_cast<const char*>(address);
        std::lock_guard lock(mutex_);
        auto after = sizes_.upper_bound(byte);
        return after != sizes_.begin() && byte < std::prev(after)->first + std::prev(after)->second;
    }

    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }

  private:
    void free(void* address) {
        std::lock_guard lock(mutex_);
        sizes_.erase(static_cast<char*>(address));
        ::free(address);
    }

    std::mutex mutex_;
    std::map<const char*, size_t> sizes_;
};

inline PinnedAllocator& pinned_allocator() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
}

inline c10::DeleterFnPtr PinnedAllocator::raw_deleter() const {
    return [](void* address) { pinned_allocator().free(address); };
}

// A tensor of the CPU in the memory of `tensor`, for kernels. It does not keep the memory, as kernels do not.
inline at::Tensor for_kernels(const at::Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU);
    at::Tensor made;
    if (tensor.numel() == 0) {
        made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    } else {
        void* start = memory_of(tensor.get_device()).for_kernels(tensor.const_data_ptr());
        made = at::from_blob(start, tensor.sizes(), tensor.strides(), options);
    }
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
}

inline std::vector<at::Tensor> for_kernels(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& tensor : tensors) {
        made.push_back(for_kernels(tensor));
    }
    return made;
}

}  // namespace simulated
