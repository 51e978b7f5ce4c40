// RocketMQ's Node.js client sends or consumes until its input ends: ROLE ENDPOINT MESSAGES
const [role, endpoints, messages] = process.argv.slice(2);
const client = `${process.cwd()}/node_modules/rocketmq-client-nodejs`;
const rocketmq = require(client);
const { ConsumeResult, FilterExpression } = rocketmq;
const { TransactionResolution } = require(`${client}/proto/apache/rocketmq/v2/definition_pb`);

const seen = new Set();
const quiet = () => {};

// Shows a message; false if it is to come again.
function isDone(message) {
  const { tag, properties, messageGroup } = message, body = message.body.toString();
  const shown = [body, tag, properties.get('to'), properties.get('due'), messageGroup || ''];
  console.log(['got', Date.now(), ...shown].join('\t'));
  const isFirst = !seen.has(body);
  seen.add(body);
  return !(isFirst && body.endsWith(':again'));
}

// Sends one message, and does with it what its body says.
async function send(producer, topic, body, delayS, group) {
  const due = Date.now() + delayS * 1_000;
  const transaction = topic === 'bank' ? producer.beginTransaction() : undefined;
  const sent = await producer.send({
    topic,
    body: Buffer.from(`nodejs:${body}`),
    tag: 'new',
    keys: ['k1'],
    properties: new Map([['to', 'größe'], ['due', String(due)]]),
    ...(delayS && { deliveryTimestamp: new Date(due) }),
    ...(group && { messageGroup: group }),
  }, transaction);
  if (body === 'recalled') await producer.recallMessage(topic, sent.recallHandle);
  if (body === 'committed') await transaction.commit();
  if (body === 'rolled back') await transaction.rollback();
}

async function main() {
  let isEnded = false;
  const ended = new Promise(resolve => process.stdin.on('end', resolve).resume());
  ended.then(() => { isEnded = true; });
  const kind = { send: 'Producer', push: 'PushConsumer', simple: 'SimpleConsumer' }[role];
  const one = new rocketmq[kind]({
    endpoints,
    namespace: '',
    requestTimeout: 20_000,
    logger: { debug: quiet, info: quiet, warn: quiet, error: console.error },
    topic: 'plain',
    checker: { check: async () => TransactionResolution.COMMIT },
    consumerGroup: `nodejs-${role}`,
    subscriptions: new Map([['plain', '*']]),
    awaitDuration: 1_000,
    messageListener: {
      consume: async message => (isDone(message) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE),
    },
  });
  await one.startup();
  if (role === 'send') {
    for (const message of JSON.parse(messages)) await send(one, ...message);
    console.log('sent');
  }
  // Client 1.0.8 that is started with several topics waits for settings that have come already.
  for (const topic of role === 'send' ? [] : ['keyed', 'bank']) {
    await one.subscribe(topic, new FilterExpression('*'));
  }
  while (role === 'simple' && !isEnded) {
    for (const message of await one.receive(16, 30_000)) {
      if (isDone(message)) await one.ack(message);
      else await one.changeInvisibleDuration(message, 10_000);
    }
  }
  await ended;
  await one.shutdown();
  process.exit(0);
}

main();
