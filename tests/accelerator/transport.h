// Collectives as NCCL's: kernels on a stream of their own, for which the host does not wait. Gloo carries the data.
#pragma once

#include "operators.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// The state of a communicator, which its kernels share.
class Communicator {
  public:
    void check() {
        std::lock_guard lock(mutex_);
        TORCH_CHECK(error_.empty(), "the simulated communicator has failed: ", error_);
    }

    bool has_failed() {
        std::lock_guard lock(mutex_);
        return !error_.empty();
    }

    // As NCCL's kernels, which do not notice that a peer is lost.
    void hang(const std::string& error) {
        std::unique_lock lock(mutex_);
        aborted_.wait(lock, [&] { return is_aborted_; });
        error_ = error;
    }

    void abort() {
        {
            std::lock_guard lock(mutex_);
            is_aborted_ = true;
            error_ = "aborted";
        }
        aborted_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable aborted_;
    bool is_aborted_ = false;
    std::string error_;
};

// The tensors of a collective, until a stream waits for it or it has ended. As NCCL, which does not record streams.
class Kept {
  public:
    explicit Kept(Tensors tensors) : tensors_(std::move(tensors)) {}

    void drop() {
        Tensors dropped;  // deleted without the lock: that may run anything
        std::lock_guard lock(mutex_);
        dropped.swap(tensors_);
    }

  private:
    std::mutex mutex_;
    Tensors tensors_;
};

class Work final : public c10d::Work {
  public:
    Work(int rank, OpType type, Device device, Tensors outputs, std::shared_ptr<Communicator> communicator,
         std::shared_ptr<Kept> kept, const Stream& stream)
        : c10d::Work(rank, type),
          device_(device),
          outputs_(std::move(outputs)),
          communicator_(std::move(communicator)),
          kept_(std::move(kept)),
          end_(queue_of(stream).moment()) {
        auto type_of_outputs = c10::ListType::create(c10::TensorType::get());
        future_ = c10::make_intrusive<c10::ivalue::Future>(type_of_outputs, std::vector<Device>{device});
        c10::StreamGuard guard(stream);  // whoever waits for the future waits for this stream
        future_->markCompleted(IValue(outputs_));
    }

    bool isCompleted() override { return is_over(end_); }
    bool isSuccess() const override { return !communicator_->has_failed(); }
    Tensors result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

    bool wait(std::chrono::milliseconds) override {
        communicator_->check();
        synchronize();
        return true;
    }

    void synchronize() override {
        current_queue(device_.index()).wait_for(end_);
        kept_->drop();
    }

  private:
    const Device device_;
    const Tensors outputs_;
    const std::shared_ptr<Communicator> communicator_;
    const std::shared_ptr<Kept> kept_;
    const Moment end_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Transport final : public c10d::Backend {
  public:
    Transport(int rank, int size, BackendPtr gloo) : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

    const std::string getBackendName() const override { return "hccl"; }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return start(OpType::ALLREDUCE, tensors, tensors, [=, views = for_kernels(tensors)](auto& gloo) mutable {
            return gloo.allreduce(views, options);
        });
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return start(OpType::BROADCAST, tensors, tensors, [=, views = for_kernels(tensors)](auto& gloo) mutable {
            return gloo.broadcast(views, options);
        });
    }

    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        Tensors used = outputs.at(0);
        used.push_back(inputs.at(0));
        std::vector<Tensors> received{for_kernels(outputs[0])};
        return start(OpType::ALLGATHER, used, outputs[0], [=, sent = for_kernels(inputs)](auto& gloo) mutable {
            return gloo.allgather(received, sent, options);
        });
    }

    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
        return start(OpType::_ALLGATHER_BASE, {output, input}, {output},
                     [=, received = for_kernels(output), sent = for_kernels(input)](auto& gloo) mutable {
                         return gloo._allgather_base(received, sent, options);
                     });
    }

    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& options) override {
        return start(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output},
                     [=, received = for_kernels(output), sent = for_kernels(input)](auto& gloo) mutable {
                         return gloo._reduce_scatter_base(received, sent, options);
                     });
    }

    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received_rows,
                          std::vector<int64_t>& sent_rows, const c10d::AllToAllOptions& options) override {
        return start(OpType::ALLTOALL_BASE, {output, input}, {output},
                     [=, received = for_kernels(output), sent = for_kernels(input)](auto& gloo) mutable {
                         return gloo.alltoall_base(received, sent, received_rows, sent_rows, options);
                     });
    }

    WorkPtr barrier(const c10d::BarrierOptions&) override {
        Tensors one{at::zeros({1}, at::TensorOptions().device(kType))};
        auto work = allreduce(one, {});
        work->wait();
        wait_on_host(current_queue(current_device).moment());
        return work;
    }

    void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

    void abort() override {
        communicator_->abort();
        gloo_->abort();
    }

    void shutdown() override { gloo_->shutdown(); }

  private:
    Stream stream_of(DeviceIndex device) {
        std::lock_guard lock(mutex_);
        auto found = streams_.find(device);
        if (found == streams_.end()) {
            found = streams_.emplace(device, streams_of(device).make(kCollective)).first;
        }
        return found->second;
    }

    // Queue a collective after the caller's stream. collective: starts it on gloo, when the stream is there.
    template <typename Collective>
    WorkPtr start(OpType type, const Tensors& used, const Tensors& outputs, Collective collective) {
        Device device = used.at(0).device();
        for (const at::Tensor& tensor : used) {
            TORCH_CHECK(tensor.device() == device && is_on_device(tensor) && tensor.is_contiguous(),
                        "hccl needs contiguous tensors on one device");
        }
        communicator_->check();
        Stream stream = stream_of(device.index());
        Queue& queue = queue_of(stream);
        queue.wait_for(current_queue(device.index()).moment());
        auto kept = std::make_shared<Kept>(used);
        queue.push([gloo = gloo_, communicator = communicator_, kept, collective]() mutable {
            if (communicator->has_failed()) {
                return;
            }
            try {
                collective(*gloo)->wait();
            } catch (const std::exception& error) {
                communicator->hang(error.what());
            }
            kept->drop();
        });
        return c10::make_intrusive<Work>(getRank(), type, device, outputs, communicator_, kept, stream);
    }

    const BackendPtr gloo_;
    const std::shared_ptr<Communicator> communicator_ = std::make_shared<Communicator>();
    std::mutex mutex_;
    std::map<DeviceIndex, Stream> streams_;
};

}  // namespace simulated
