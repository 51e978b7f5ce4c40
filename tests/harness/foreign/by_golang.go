// RocketMQ's Go client, by remoting, sends or consumes until its input ends: ROLE NAMESRV MESSAGES
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

// Name of the property that other clients keep the message group in; this client's own is "SHARDING_KEY".
const shardingKey = "__SHARDINGKEY"

var topics = []string{"plain", "keyed", "bank"}
var seen sync.Map

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// Shows a message; false if it is to come again.
func isDone(message *primitive.MessageExt) bool {
	body := string(message.Body)
	fmt.Println(strings.Join([]string{"got", strconv.FormatInt(time.Now().UnixMilli(), 10), body, message.GetTags(),
		message.GetProperty("to"), message.GetProperty("due"), message.GetProperty(shardingKey)}, "\t"))
	_, again := seen.LoadOrStore(body, true)
	return again || !strings.HasSuffix(body, ":again")
}

type bank struct{}

func (bank) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	switch string(message.Body) {
	case "golang:committed":
		return primitive.CommitMessageState
	case "golang:rolled back":
		return primitive.RollbackMessageState
	}
	return primitive.UnkonwnState
}

func (bank) CheckLocalTransaction(*primitive.MessageExt) primitive.LocalTransactionState {
	return primitive.CommitMessageState
}

// Sends all messages, and does with each what its body says; this client recalls none.
func send(namesrv primitive.NamesrvAddr, text string) {
	var messages [][]any
	must(json.Unmarshal([]byte(text), &messages))
	one, err := rocketmq.NewProducer(producer.WithNameServer(namesrv), producer.WithGroupName("golang"),
		producer.WithQueueSelector(producer.NewHashQueueSelector()))
	must(err)
	must(one.Start())
	// Two producers with one instance name share a client, which takes check-backs for the first one alone.
	money, err := rocketmq.NewTransactionProducer(bank{}, producer.WithNameServer(namesrv), producer.WithGroupName("golang-bank"),
		producer.WithInstanceName("bank"))
	must(err)
	must(money.Start())
	for _, fields := range messages {
		topic, body, group := fields[0].(string), fields[1].(string), fields[3].(string)
		if body == "recalled" {
			continue
		}
		delay := time.Duration(fields[2].(float64)) * time.Second
		due := time.Now().Add(delay)
		message := primitive.NewMessage(topic, []byte("golang:"+body)).WithTag("new").WithKeys([]string{"k1"})
		message.WithProperty("to", "größe")
		message.WithProperty("due", strconv.FormatInt(due.UnixMilli(), 10))
		if delay > 0 {
			message.WithDelayTimestamp(due)
		}
		if group != "" {
			message.WithShardingKey(group).WithProperty(shardingKey, group)
		}
		if topic == "bank" {
			_, err = money.SendMessageInTransaction(context.Background(), message)
		} else {
			_, err = one.SendSync(context.Background(), message)
		}
		must(err)
	}
}

// Consumes: "push" in order, "concurrent" with retries by the broker.
func push(namesrv primitive.NamesrvAddr, role string) {
	inOrder := role == "push"
	one, err := rocketmq.NewPushConsumer(consumer.WithNameServer(namesrv), consumer.WithGroupName("golang-"+role),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset), consumer.WithConsumerOrder(inOrder))
	must(err)
	listener := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			if isDone(message) {
				continue
			}
			if inOrder {
				return consumer.SuspendCurrentQueueAMoment, nil
			}
			return consumer.ConsumeRetryLater, nil
		}
		return consumer.ConsumeSuccess, nil
	}
	for _, topic := range topics {
		must(one.Subscribe(topic, consumer.MessageSelector{}, listener))
	}
	must(one.Start())
}

func main() {
	rlog.SetLogLevel("error")
	role, namesrv, text := os.Args[1], primitive.NamesrvAddr{os.Args[2]}, os.Args[3]
	if role == "send" {
		send(namesrv, text)
		fmt.Println("sent")
	} else {
		push(namesrv, role)
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	must(err)
}
