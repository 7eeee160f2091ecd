// A simulated accelerator: torch's PrivateUse1 with asynchronous streams, and memory that the host cannot read.
//
// One unit, since torch's headers take most of the time to compile.
#include <torch/csrc/utils/pybind.h>

#include "transport.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace simulated {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return is_started; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(DeviceIndex index) const override { Guard::set(index); }

    DeviceIndex exchangeDevice(DeviceIndex index) const override {
        DeviceIndex before = current_device;
        Guard::set(index);
        return before;
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }

    Device getDeviceFromPtr(void* address) const override {
        for (DeviceIndex index = 0; index < kDevices; ++index) {
            if (memory_of(index).contains(address)) {
                return Device(kType, index);
            }
        }
        TORCH_CHECK(false, "the address is of no simulated device");
    }

    bool isPinnedPtr(const void* address) const override { return pinned_allocator().contains(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
    const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return generator_of(index); }
    at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        resize_storage(storage, bytes);
    }
};

}  // namespace simulated

PYBIND11_MODULE(simulated_accelerator, module) {
    using namespace simulated;
    c10::SetAllocator(kType, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    module.def("device_count", [] { return kDevices; });
    module.def("current_device", [] { return current_device; });
    module.def("set_device", Guard::set);
    module.def("is_initialized", [] { return is_started.load(); });
    module.def("init", [] { is_started = true; });
    module.def("generator", generator_of);
    module.def("set_delays", [](int main, int side, int collective) {
        longest_delays[kMain] = main;
        longest_delays[kSide] = side;
        longest_delays[kCollective] = collective;
    });
    module.def("set_seed", [](int value) { seed = value; });
    module.def("sleep_ms", [](int milliseconds) {
        current_queue(current_device).push([milliseconds] {
            std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        });
    });
    module.def("synchronous_calls", [] { return synchronous_calls.counts(); });
    module.def("end", [] { is_ending = true; });
    module.def("transport", [](int rank, int size, BackendPtr gloo) {
        return BackendPtr(c10::make_intrusive<Transport>(rank, size, gloo));
    });
}
